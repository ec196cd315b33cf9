"""Ours beside a paper's, place by place: a verdict that is computed, not felt.

agrees            the difference is within both spreads and what can be read off a curve
ordering agrees   it is not, but ours stand in the paper's order to all others of the table
differs           neither; by how much, and why, where that is known; of one seed no spread is known

Beside each stands how many seeds it is of, and how many the paper has where those are more. What the paper
says in words is judged in `trilemma_lab.studies.claims`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trilemma.report import Table
from trilemma.report.tables import SHARES
from trilemma_lab.papers.published import Paper, Printed
from trilemma_lab.studies.claims import WIDE, Kind, judged, sentences, written
from trilemma_lab.studies.filled import partly_searched
from trilemma_lab.studies.measured import Measured, Results
from trilemma_lab.studies.study import studies

FAR = 3
"""From what factor on a quotient says more than a difference."""

NOTHING = (
    "nothing to compare: the paper has no number for a place that was run; trilemma papers figure draws ours"
)
PARTLY = (
    "not all of the grid was tried, the best may be higher (trilemma papers run --missing tries the rest)"
)
AGAIN = "trilemma papers check tells whether that matters, run makes new results"
"""Remarks below a table of verdicts."""


@dataclass(frozen=True)
class Verdict:
    """One place of which both have a number; `difference` is ours minus theirs, or minus their bound."""

    cell: Measured
    printed: Printed
    kind: Kind
    difference: float | None = None
    cause: str = ""

    @property
    def words(self) -> str:
        """The verdict, with the difference where it matters."""
        share, apart = self.printed.metric in SHARES, self.difference or 0.0
        if self.kind == "agrees" and share and self.printed.below is None and abs(apart) > WIDE:
            return f"agrees, but only by a wide spread ({100 * apart:+.1f})"
        if self.kind != "differs" or self.difference is None:
            return self.kind
        alone = " (one seed)" if len(self.cell.seeds) == 1 else ""
        if share:
            return f"differs by {100 * self.difference:+.1f}{alone}"
        far = _times(self.difference, self.printed.value) or f"differs by {self.difference:+.3g}"
        return far + alone


def _times(difference: float, value: float | None) -> str:
    """Say how many times larger or smaller ours is, where it is several times.

    >>> _times(-98.0, 100.0), _times(1.0, 100.0)
    ('differs: 50 times smaller', '')
    """
    ours = difference + (value or 0.0)
    if not value or ours / value <= 0:
        return ""
    factor = ours / value
    if 1 / FAR < factor < FAR:
        return ""
    return f"differs: {factor:.3g} times larger" if factor > 1 else f"differs: {1 / factor:.3g} times smaller"


def verdicts(results: Results, paper: Paper) -> list[Verdict]:
    """Compare every place of which both have a number."""
    both = [
        (cell, printed)
        for cell in results.cells
        for metric in cell.metrics
        if (printed := paper.at(*cell.place, metric)) is not None
    ]
    return [_verdict(cell, printed, both, paper) for cell, printed in both]


def _verdict(
    cell: Measured, printed: Printed, both: Sequence[tuple[Measured, Printed]], paper: Paper
) -> Verdict:
    """Compare ours with what is printed at one place; a known cause is told where they do not agree."""
    ours = cell.metrics[printed.metric]
    difference: float | None = None
    in_order = False
    if ours.mean is None or (printed.value is None and printed.below is None):
        agrees = ours.mean is None and printed.value is None  # both diverged
    elif printed.value is None:
        assert printed.below is not None
        difference = ours.mean - printed.below
        agrees = difference < 0
    else:
        difference = ours.mean - printed.value
        agrees = abs(difference) <= (ours.std or 0.0) + (printed.std or 0.0) + printed.within
        in_order = not agrees and _in_order(cell, printed, both)
    if agrees:
        return Verdict(cell, printed, "agrees", difference)
    cause = next((one.text for one in paper.causes if one.about(*cell.place, printed.metric)), "")
    return Verdict(cell, printed, "ordering agrees" if in_order else "differs", difference, cause)


def _in_order(cell: Measured, printed: Printed, both: Iterable[tuple[Measured, Printed]]) -> bool:
    """Whether ours are to the others of the table as theirs are, where the paper can tell them apart."""
    pairs = [
        (_mean(cell, printed) - _mean(other, theirs), (printed.value or 0.0) - (theirs.value or 0.0))
        for other, theirs in both
        if (other.table, theirs.metric) == (cell.table, printed.metric)
        and theirs.value is not None
        and other.metrics[theirs.metric].mean is not None
        and abs((printed.value or 0.0) - theirs.value) > printed.within + theirs.within
    ]
    return bool(pairs) and all(ours * theirs > 0 for ours, theirs in pairs)


def _mean(cell: Measured, printed: Printed) -> float:
    found = cell.metrics[printed.metric].mean
    assert found is not None
    return found


def verdict_table(name: str, results: Results, paper: Paper, compute: str = "") -> Table:
    """Lay the verdicts out; below, how many of each kind, and how far results are behind the code.

    `compute` is the module of a study without runs.
    """
    found = verdicts(results, paper)
    claimed = judged(results, paper)
    lines = tuple(
        (
            one.cell.table,
            one.cell.row,
            one.cell.column,
            one.printed.figure,
            one.printed.metric.replace("_", " "),
            written(one.cell, one.printed.metric),
            said(one.printed),
            one.words,
            paper.seeds_said(name, len(one.cell.seeds)),
            one.cause,
        )
        for one in found
    ) + tuple(one.line(paper.seeds_said(name, one.seeds)) for one in claimed)
    kinds = ("agrees", "ordering agrees", "differs")
    given: list[str] = [*(one.kind for one in found), *(one.kind for one in claimed)]
    counts = ", ".join(f"{kind}: {given.count(kind)}" for kind in kinds) if given else NOTHING
    age = results.staleness(compute).words
    partly = partly_searched(studies[name], results.cells) if name in studies else []
    remarks = [
        counts,
        paper.reference,
        *([f"{len(partly)} of {len(results.cells)} cells: {PARTLY}"] if partly else []),
        *([f"{age} ({AGAIN})"] if age else []),
    ]
    heads = ("table", "row", "column", "there", "what", "ours", "paper", "verdict", "seeds", "known cause")
    return Table(f"{name}: ours beside the paper's", heads, lines, tuple(remarks), words=len(heads))


@dataclass(frozen=True)
class Ordering:
    """Of how many pairs of methods in a table the paper's order is ours too, of those that it tells apart."""

    table: str
    pairs: int
    alike: int

    @property
    def words(self) -> str:
        """Say it.

        >>> Ordering("Table 5", 12, 9).words
        "the paper's ordering of methods holds in 9 of 12 comparisons"
        """
        if not self.pairs:
            return "no two methods that the paper tells apart were run alike"
        return f"the paper's ordering of methods holds in {self.alike} of {self.pairs} comparisons"


def orderings(results: Results, paper: Paper, metric: str = "accuracy") -> list[Ordering]:
    """Compare pairs of rows, table by table: within a column, and of the same number of rounds.

    The paper tells two apart that differ by more than both its spreads. Runs of different lengths are not
    compared: the longer one would be ahead by that alone.
    """
    both = [
        (cell, printed)
        for cell in results.cells
        if metric in cell.metrics and (printed := paper.at(*cell.place, metric)) is not None
    ]
    found = {table: [0, 0] for table in dict.fromkeys(cell.table for cell, _ in both)}
    for i, (cell, printed) in enumerate(both):
        for other, theirs in both[:i]:
            alike = (cell.table, cell.column, _rounds(cell)) == (other.table, other.column, _rounds(other))
            apart = _printed_value(printed) - _printed_value(theirs)
            room = printed.within + theirs.within + (printed.std or 0.0) + (theirs.std or 0.0)
            if alike and abs(apart) > room:
                found[cell.table][0] += 1
                found[cell.table][1] += (_score(cell, metric) - _score(other, metric)) * apart > 0
    return [Ordering(table, *counts) for table, counts in found.items()]


def _rounds(cell: Measured) -> object:
    return cell.settings.get("run.rounds")


def _printed_value(printed: Printed) -> float:
    """Return what is printed; a star, a run that diverged, is behind all others."""
    return -1.0 if printed.value is None else printed.value


def _score(cell: Measured, metric: str) -> float:
    mean = cell.metrics[metric].mean
    return -1.0 if mean is None else mean


def summed_up(name: str, results: Results, paper: Paper) -> str:
    """Say in one line how a study compares: numbers, then sentences of the paper's text."""
    given: list[str] = [one.kind for one in verdicts(results, paper)]
    kinds = ("agrees", "ordering agrees", "differs")
    counted = ", ".join(f"{kind}: {given.count(kind)}" for kind in kinds if given)
    said_so = [one for one in sentences(paper.claims, results, paper) if one.places]
    held_up = f"{sum(one.holds for one in said_so)} of {len(said_so)} sentences hold" if said_so else ""
    behind = [paper.seeds_said(name, len(cell.seeds)) for cell in results.cells]
    few = sum(" of " in one for one in behind)
    fewer = f"{few} of {len(behind)} places with fewer seeds than the paper" if few else ""
    said_so_far = [part for part in (counted and f"numbers: {counted}", held_up, fewer) if part]
    return "; ".join(said_so_far) or "the paper has nothing to compare with"


def said(printed: Printed) -> str:
    """Write theirs: ≈ where it is read off, a star where the paper has one.

    >>> said(Printed("s", "r", "c", "Figure 1", value=0.83, read_off=True))
    '≈ 83'
    """
    factor = 100 if printed.metric in SHARES else 1
    if printed.below is not None:
        return f"< {factor * printed.below:.4g}"
    if printed.value is None:
        return "*"
    std = "" if printed.std is None else f" ± {factor * printed.std:.3g}"
    return f"{'≈ ' if printed.read_off else ''}{factor * printed.value:.4g}{std}"
