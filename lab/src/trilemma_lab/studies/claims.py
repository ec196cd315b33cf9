"""What a paper says in words, as functions of the data: held against ours place by place, and as a whole.

beats               agrees: ahead of all others by more than the slack; ordering agrees: ahead of all
matches or beats    agrees: behind nobody by more than the slack
is close to         agrees: within the slack of everybody
is behind           agrees: behind everybody by as much as it says, within the slack
has a wider gap     agrees: further behind the others here than there by more than the slack;
                    ordering agrees: further behind
stays below         agrees: below what it says; no others

The slack is both spreads and what the words leave open (`within`). Else ours differ, by as much as from the
row that fits least. A run that diverged is behind all that did not. Of losses and costs, less is ahead. What
agrees by its spreads alone says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trilemma.base.records import Spread
from trilemma.report.tables import SHARES, number, percent
from trilemma_lab.papers.published import Claim, Paper
from trilemma_lab.studies.measured import Measured, Results

Kind = Literal["agrees", "ordering agrees", "differs"]

DIVERGED = 1e6
"""How far behind all others a run that diverged counts."""

WIDE = 0.1
"""A difference of shares that is remarkable though it is within both spreads."""

ORDER = "order"
"""The metric that a cause names to be about claims."""

Place = tuple[str, str, str]


@dataclass(frozen=True)
class Judged:
    """A claim at one place of ours: how far ours is ahead of the row that fits it least."""

    cell: Measured
    claim: Claim
    kind: Kind
    other: str
    ahead: float
    cause: str = ""
    seeds: int = 0
    """The fewest seeds of all rows it is about."""

    @property
    def unclear(self) -> bool:
        """Whether it agrees by its spreads alone: ours are so wide that it could not fail."""
        off = {
            "matches or beats": -self.ahead,
            "is close to": abs(self.ahead),
            "is behind": abs(self.ahead + self.claim.by),
        }.get(self.claim.says, 0.0)
        share = self.claim.metric in SHARES
        return self.kind != "differs" and share and off > max(WIDE, self.claim.within)

    @property
    def words(self) -> str:
        """The verdict, with the distance where it matters."""
        ahead = self.ahead
        far = f"{100 * ahead:+.1f}" if self.claim.metric in SHARES else f"{ahead:+.3g}"
        if self.kind != "differs":
            return f"{self.kind}, but only by a wide spread ({far})" if self.unclear else self.kind
        if abs(ahead) > DIVERGED / 2:
            return f"differs: {self.cell.row if ahead < 0 else self.other} diverged"
        return f"differs by {far} from {self.other}"

    def line(self, seeds: str) -> tuple[str, ...]:
        """As a line of the table of verdicts; `seeds` says how many there are."""
        here, metric = self.cell, self.claim.metric
        ours = written(here, metric)
        said = (self.claim.figure, metric.replace("_", " "), ours, self.claim.words, self.words, seeds)
        return (*here.place, *said, self.cause)


def judged(results: Results, paper: Paper) -> list[Judged]:
    """Hold all that a paper claims against ours, wherever the row and another of the claim were run."""
    return [one for claim in paper.claims for one in held(claim, results.cells, paper)]


def held(claim: Claim, cells: Iterable[Measured], paper: Paper) -> list[Judged]:
    """Hold one claim against cells, at every place that it is about."""
    found = {cell.place: cell for cell in cells if claim.metric in cell.metrics}
    lines = []
    for cell in found.values():
        if claim.about(*cell.place):
            others = {row: found.get(claim.other(row, cell.table, cell.column)) for row in claim.others}
            there = {row: one for row, one in others.items() if one is not None and _as_long(cell, one)}
            if there or claim.says == "stays below":
                lines.append(_judge(claim, cell, there, found, paper))
    return [one for one in lines if one.other]


def _as_long(one: Measured, other: Measured) -> bool:
    """Whether two runs have as many rounds: else the longer would be ahead by that alone."""
    return one.settings.get("run.rounds") == other.settings.get("run.rounds")


def _judge(
    claim: Claim,
    cell: Measured,
    others: Mapping[str, Measured],
    found: Mapping[Place, Measured],
    paper: Paper,
) -> Judged:
    """Hold a claim against ours at one place; `worst` is the row that fits it least."""
    if claim.says == "has a wider gap":
        ahead, slack, involved = _gaps(claim, cell, others, found)
    elif claim.says == "stays below":
        mean = cell.metrics[claim.metric].mean
        ahead, involved = {"what it says": -DIVERGED if mean is None else claim.by - mean}, []
        slack = {"what it says": 0.0}
    else:
        ahead = {row: _ahead(cell, other, claim) for row, other in others.items()}
        slack = {row: claim.within + _spread(claim, cell, other) for row, other in others.items()}
        involved = list(others.values())
    fit = {row: _fits(claim, ahead[row], slack[row]) for row in ahead}
    worst = min(fit, key=lambda row: fit[row], default="")
    kind: Kind = "agrees" if fit and fit[worst] >= 0 else "differs"
    if claim.says in ("beats", "has a wider gap") and fit:
        worst = min(ahead, key=lambda row: ahead[row])
        kind = "ordering agrees" if ahead[worst] > 0 else "differs"
        if all(ahead[row] > slack[row] for row in ahead):
            kind = "agrees"
    causes = (one for one in paper.causes if ORDER in one.metrics and one.about(*cell.place, ORDER))
    cause = next((one.text for one in causes), "") if kind == "differs" else ""
    seeds = min(len(one.seeds) for one in (cell, *involved))
    return Judged(cell, claim, kind, worst, ahead.get(worst, 0.0), cause, seeds)


def _fits(claim: Claim, ahead: float, slack: float) -> float:
    """Return by how much a claim holds of one row, negative where it does not."""
    rules: Mapping[str, Callable[[], float]] = {
        "is close to": lambda: slack - abs(ahead),
        "is behind": lambda: slack - abs(ahead + claim.by),
        "stays below": lambda: ahead,
    }
    return rules.get(claim.says, lambda: ahead + slack)()


def _gaps(
    claim: Claim, cell: Measured, others: Mapping[str, Measured], found: Mapping[Place, Measured]
) -> tuple[dict[str, float], dict[str, float], list[Measured]]:
    """Return by how much a row is further behind others here than there, and the slack of that."""
    ahead: dict[str, float] = {}
    slack: dict[str, float] = {}
    involved: list[Measured] = []
    own = found.get(claim.other(cell.row, cell.table, cell.column))
    for row, there in others.items():
        here = found.get((cell.table, row, cell.column))
        if own is not None and here is not None:
            ahead[row] = _ahead(here, cell, claim) - _ahead(there, own, claim)
            slack[row] = claim.within + _spread(claim, cell, here) + _spread(claim, own, there)
            involved += [own, here, there]
    return ahead, slack, involved


def _ahead(one: Measured, other: Measured, claim: Claim) -> float:
    return _value(one.metrics[claim.metric], claim) - _value(other.metrics[claim.metric], claim)


def _spread(claim: Claim, *cells: Measured) -> float:
    return sum(cell.metrics[claim.metric].std or 0.0 for cell in cells)


def _value(spread: Spread, claim: Claim) -> float:
    """Return what more of is ahead."""
    if spread.mean is None:
        return -DIVERGED
    more_is_ahead = claim.metric in SHARES or claim.metric.startswith("accuracy")
    return spread.mean if more_is_ahead else -spread.mean


@dataclass(frozen=True)
class Sentence:
    """A sentence of a paper, or of ours, and at how many of its places it holds, or its order alone does.

    `unclear`: at so many places it agrees by spreads that are too wide to tell, which is not holding.
    """

    text: str
    figure: str
    places: int
    holding: int
    ordered: int = 0
    unclear: int = 0
    seeds: int = 0
    mostly: bool = False

    @property
    def holds(self) -> bool:
        """Whether it or its order holds: everywhere, or at most places where it says no more."""
        found = self.holding + self.ordered
        return 2 * found > self.places if self.mostly else found == self.places

    @property
    def verdict(self) -> str:
        """In words.

        >>> Sentence("a beats b", "Figure 1", 3, 2, ordered=1).verdict
        'holds at 2 of 3 places, its order alone at 1'
        >>> Sentence("a beats b", "Figure 1", 3, 2, unclear=1).verdict
        'cannot be told: holds at 2 of 3 places, spreads too wide at 1'
        >>> Sentence("a beats b", "Figure 1", 1, 0).verdict
        'does not hold'
        """
        if self.places == 1 and not self.unclear:
            return "does not hold" if not self.holds else "holds" if self.holding else "its order alone holds"
        parts = [f"holds at {self.holding} of {self.places} places"]
        parts += [f"its order alone at {self.ordered}"] if self.ordered else []
        parts += [f"spreads too wide at {self.unclear}"] if self.unclear else []
        told = self.holds or self.holding + self.ordered + self.unclear < self.places
        begin = "" if self.holds else "does not hold everywhere: " if told else "cannot be told: "
        return begin + ", ".join(parts)


def sentences(claims: Sequence[Claim], results: Results, paper: Paper) -> list[Sentence]:
    """Return a verdict for each sentence; those of which nothing was run have no place."""
    found: dict[tuple[str, str], list[tuple[Claim, list[Judged]]]] = {}
    for claim in claims:
        said = (claim.text or f"{claim.row} {claim.words}", claim.figure)
        found.setdefault(said, []).append((claim, held(claim, results.cells, paper)))
    lines = []
    for (text, figure), parts in found.items():
        places = [one for _, own in parts for one in own]
        ordered = sum(one.kind == "ordering agrees" for one in places)
        unclear = sum(one.unclear for one in places)
        holding = sum(one.kind == "agrees" and not one.unclear for one in places)
        seeds = min((one.seeds for one in places), default=0)
        mostly = any(claim.mostly for claim, _ in parts)
        lines.append(Sentence(text, figure, len(places), holding, ordered, unclear, seeds, mostly))
    return lines


def written(cell: Measured, metric: str) -> str:
    """Write ours: in per cent where it is a share."""
    spread = cell.metrics[metric]
    return percent(spread) if metric in SHARES else number(spread)
