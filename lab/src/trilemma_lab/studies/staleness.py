"""How far results are behind the code, and what running some of them again has shown since."""

from __future__ import annotations

from dataclasses import dataclass

from trilemma.base.typed import Count, Number


@dataclass(frozen=True)
class Staleness:
    """How far results are behind the code: cells whose code is not known, sources that changed since.

    >>> Staleness(40, 3, ("learning/steps/momentum.py",)).words
    '3 of 40 cells are by code that is not known; 1 source has changed since: learning/steps/momentum.py'
    """

    cells: int
    unknown: int
    changed: tuple[str, ...]
    rerun: str = ""
    """What was run again since, in words."""

    @property
    def words(self) -> str:
        """Say it; nothing where today's sources made all of it."""
        kept = (self._of_unknown_code(), self._of_changed_sources(), self.rerun)
        return "; ".join(one for one in kept if one)

    @property
    def brief(self) -> str:
        """Say it in a few words."""
        unknown = "of earlier code" if self.unknown == self.cells else "in part of earlier code"
        count = len(self.changed)
        changes = f"{count} source{'s' if count > 1 else ''} changed since" if count else ""
        return "; ".join(one for one in (unknown if self.unknown else "", changes, self.rerun) if one)

    def _of_unknown_code(self) -> str:
        return f"{self.unknown} of {self.cells} cells are by code that is not known" if self.unknown else ""

    def _of_changed_sources(self) -> str:
        if not self.changed:
            return ""
        count, more = len(self.changed), len(self.changed) - MENTIONED
        named = ", ".join(self.changed[:MENTIONED]) + (f" and {more} more" if more > 0 else "")
        return f"{count} source{'s have' if count > 1 else ' has'} changed since: {named}"


MENTIONED = 6
"""Changed sources that are named."""


@dataclass(frozen=True)
class Rerun:
    """Cells that were run once more: where they stand, how many are the same to the last digit.

    `furthest` is the largest difference of a metric, as a share of what it was.

    >>> Rerun((("t", "r", "c"),), 1, 0.0, "1a2b", "2026-11-16", "a CPU").words(today=True)
    '1 of 1 cells run again by this code is the same'
    """

    places: tuple[tuple[str, str, str], ...]
    same: Count
    furthest: Number
    code: str
    date: str
    device: str

    def words(self, today: bool) -> str:
        """Say it."""
        by = "this code" if today else f"code of {self.date}"
        rest = (
            "" if self.same == len(self.places) else f", others differ by up to {100 * self.furthest:.2g} %"
        )
        verb = "is" if self.same == 1 else "are"
        return f"{self.same} of {len(self.places)} cells run again by {by} {verb} the same{rest}"
