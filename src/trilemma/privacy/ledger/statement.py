"""A ledger read by who only looks: no lock, nothing mended, nothing written.

Its lines are checked against each other as when it is opened to be written; one that is still being written
is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trilemma.privacy.ledger.lines import Budget, Entry, LedgerError, Remark, read_lines


@dataclass(frozen=True)
class Statement:
    """What a ledger says: its budget, every release, every remark."""

    budget: Budget | None
    entries: tuple[Entry, ...] = ()
    remarks: tuple[Remark, ...] = ()

    @property
    def spent(self) -> tuple[str, float]:
        """The accountant with the smallest ε of all releases, and that ε."""
        costs: Mapping[str, float] = self.entries[-1].epsilon if self.entries else {}
        return min(costs.items(), key=lambda item: item[1], default=("", 0.0))


def read_statement(path: Path) -> Statement:
    """Read a ledger.

    >>> read_statement(Path("nowhere")).spent
    ('', 0.0)
    """
    if not path.is_file():
        return Statement(None)
    try:
        budget, lines = read_lines(path.read_bytes())
    except (ValueError, LookupError, TypeError) as error:
        raise LedgerError(f"{path.name} is no ledger: {error}") from None
    entries = tuple(line for line in lines if isinstance(line, Entry))
    return Statement(budget, entries, tuple(line for line in lines if isinstance(line, Remark)))
