"""Rules' κ, and what liars can hide in the noise, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from trilemma import aggregation
from trilemma.base.errors import UserError


def defined_rules(clients: int, byzantine: int) -> tuple[str, ...]:
    """Return the names of the rules that are defined for these numbers of clients.

    >>> "caf" in defined_rules(clients=7, byzantine=3), "caf" in defined_rules(clients=6, byzantine=3)
    (True, False)
    """

    def defined(name: str) -> bool:
        try:
            aggregation.parse(name, byzantine).check(clients)
        except UserError:
            return False
        return True

    return tuple(name for name in sorted(aggregation.rules) if defined(name))


def bounds_tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """Lay out what the record holds: κ of every rule, what can be hidden."""
    if record["rules"]:
        yield _rule_table(record["rules"])
    if "hidden" in record:
        yield _hidden_table(record["hidden"])


def _rule_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="how far Byzantine clients can move a rule's value", title_justify="left")
    for heading in ("rule", "κ", "criterion"):
        table.add_column(heading, justify="right" if heading == "κ" else "left")
    for row in rows:
        kappa = "none proven" if row["kappa"] is None else f"{row['kappa']:.4g}"
        table.add_row(row["rule"], kappa, row["criterion"])
    return table


def _hidden_table(found: Mapping[str, float]) -> Table:
    table = Table(title="what liars can hide after these rounds (docs/frontier.md)", title_justify="left")
    table.add_column("what")
    table.add_column("at most", justify="right")
    words = {
        "length": "liars who keep their noise and shift alike: shift a round that passes the test of lengths",
        "pairs": "… the test of pairs",
        "spectrum": "… below the edge of the noise",
        "mean": "… in the mean of all clients: the largest that passes all three",
        "left": "… in the mean after the correction, however far they shift",
        "most": "whatever liars send, turned noise too: in the mean, without a proof against one of them",
        "seen_after": "rounds until liars who cancel contributions of the clip's length are seen",
    }
    for name, text in words.items():
        table.add_row(text, f"{found[name]:.4g}")
    return table
