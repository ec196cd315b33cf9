"""Who is ahead of whom: what a paper says of its curves in words, held against ours column by column.

beats               agrees: ahead of all others by more than the slack; ordering agrees: ahead of all
matches or beats    agrees: behind nobody by more than the slack
is close to         agrees: within the slack of everybody

The slack is both spreads and what can be told apart on a curve. Else ours differ, by as much as from the row
that fits least. A run that diverged is behind all that did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trilemma.base.records import Spread
from trilemma.papers.measured import Measured, Results
from trilemma.papers.published import Claim, Paper
from trilemma.report.tables import SHARES, number, percent

Kind = Literal["agrees", "ordering agrees", "differs"]

METRIC = "accuracy"
"""What claims are about."""

ALL = 100
"""All points of a score: who is further ahead or behind than that has met a run that diverged."""

DIVERGED = -1.01
"""Counted for a run that diverged: more than all points behind one that did not."""

ORDER = "order"
"""The metric that a cause names to be about claims."""


@dataclass(frozen=True)
class Judged:
    """A claim at one place of ours: how many points ours is ahead of the row that fits it least."""

    cell: Measured
    claim: Claim
    kind: Kind
    other: str
    ahead: float
    cause: str = ""

    @property
    def words(self) -> str:
        """The verdict, with the distance where it matters."""
        if self.kind != "differs":
            return self.kind
        if abs(self.ahead) > ALL:
            return f"differs: {self.cell.row if self.ahead < 0 else self.other} diverged"
        return f"differs by {self.ahead:+.1f} from {self.other}"

    @property
    def line(self) -> tuple[str, ...]:
        """As a line of the table of verdicts."""
        here = self.cell
        ours = written(here, METRIC)
        return (*here.place, self.claim.figure, METRIC, ours, self.claim.words, self.words, self.cause)


def judged(results: Results, paper: Paper) -> list[Judged]:
    """Hold all that a paper claims against ours, wherever the row and another of the claim were run."""
    found = {cell.place: cell for cell in results.cells if METRIC in cell.metrics}
    lines = []
    for claim in paper.claims:
        for cell in found.values():
            others = {
                row: found[cell.table, row, cell.column].metrics[METRIC]
                for row in claim.others
                if (cell.table, row, cell.column) in found
            }
            if others and claim.about(*cell.place):
                lines.append(_judge(claim, cell, others, paper))
    return lines


def _judge(claim: Claim, cell: Measured, others: Mapping[str, Spread], paper: Paper) -> Judged:
    """Hold a claim against ours at one place; `worst` is the row that fits it least."""
    own = cell.metrics[METRIC]
    ahead = {row: _value(own) - _value(other) for row, other in others.items()}
    slack = {row: claim.within + (own.std or 0.0) + (other.std or 0.0) for row, other in others.items()}
    if claim.says == "is close to":
        worst = max(ahead, key=lambda row: abs(ahead[row]) - slack[row])
        kind: Kind = "agrees" if abs(ahead[worst]) <= slack[worst] else "differs"
    elif claim.says == "matches or beats":
        worst = min(ahead, key=lambda row: ahead[row] + slack[row])
        kind = "agrees" if ahead[worst] >= -slack[worst] else "differs"
    else:
        worst = min(ahead, key=lambda row: ahead[row])
        kind = "ordering agrees" if ahead[worst] > 0 else "differs"
        if all(ahead[row] > slack[row] for row in ahead):
            kind = "agrees"
    causes = (one for one in paper.causes if ORDER in one.metrics and one.about(*cell.place, ORDER))
    cause = next((one.text for one in causes), "") if kind == "differs" else ""
    return Judged(cell, claim, kind, worst, 100 * ahead[worst], cause)


def _value(spread: Spread) -> float:
    return DIVERGED if spread.mean is None else spread.mean


def written(cell: Measured, metric: str) -> str:
    """Write ours: in per cent where it is a share."""
    spread = cell.metrics[metric]
    return percent(spread) if metric in SHARES else number(spread)
