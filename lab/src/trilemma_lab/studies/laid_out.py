"""Runs in a browser as their paper lays them out, with the printed figures below ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from trilemma.page.answers import StudyView
from trilemma.page.studies import StudyPoint, keys_of, square
from trilemma_lab.papers import studies
from trilemma_lab.papers.published import paper
from trilemma_lab.studies.measured import Measured, Results
from trilemma_lab.studies.verdicts import said, verdicts

Spot = tuple[str, str, str, str]
"""Where a run stands in a paper's tables, and what is printed there: table, row, column, figure."""


@lru_cache(maxsize=8)
def _printed(name: str) -> tuple[tuple[str, Spot], ...]:
    """Return the runs of a paper's study by their folders' names, of a full and of a quick look."""
    entry = studies[name]
    published = paper(entry.paper).of(name)
    found: list[tuple[str, Spot]] = []
    for place in (*entry.runs(), *entry.runs(quick=True)):
        there = published.at(place.table, place.row, place.column)
        text = "" if there is None else said(there)
        found.append((place.cell.name, (place.table, place.row, place.column, text)))
    return tuple(found)


class PaperLayout:
    """The layout of the papers' tables."""

    def paper(self, study: str) -> str:
        """Return the study whose runs a folder of this name holds."""
        last = study.rpartition("/")[2]
        return last if last in studies else ""

    def table(self, study: str, points: Sequence[StudyPoint], remark: str) -> StudyView | None:
        """Lay runs out as their paper does; None where none of them is the paper's."""
        name = self.paper(study)
        return _as_printed(study, name, points, remark) if name else None


LAYOUT = PaperLayout()
"""What the page is offered (`trilemma.studies`)."""


def _as_printed(study: str, name: str, points: Sequence[StudyPoint], remark: str) -> StudyView | None:
    folders = {point.folder.name: point for point in points}
    known = {spot: folders[folder] for folder, spot in _printed(name) if folder in folders}
    if not known:
        return None
    rows = list(dict.fromkeys(_row(spot) for spot in known))
    columns = list(dict.fromkeys(spot[2] for spot in known))
    spots = {(_row(spot), spot[2]): spot for spot in known}
    judged = _judged(name, known)
    squares = [
        [
            square([known[spot]], "accuracy", spot[3], judged.get(spot[:3], ""))
            if (spot := spots.get((r, c)))
            else None
            for c in columns
        ]
        for r in rows
    ]
    return StudyView(
        name=study,
        score="accuracy",
        scores=["accuracy"],
        low_is_good=False,
        keys=keys_of(points),
        row="",
        column="",
        rows=rows,
        columns=columns,
        squares=squares,
        remark="; ".join(filter(None, [f"as in the paper ({name}); printed figures below ours", remark])),
    )


def _judged(name: str, known: Mapping[Spot, StudyPoint]) -> dict[tuple[str, str, str], str]:
    """Return the verdict of each place, as `trilemma papers compare` has it, from the runs that are there."""
    cells = tuple(
        Measured(*spot[:3], {"accuracy": point.found.summary.spread("accuracy")})
        for spot, point in known.items()
        if "accuracy" in point.found.summary.metrics
    )
    found = verdicts(Results(name, cells), paper(studies[name].paper).of(name))
    return {one.cell.place: one.words for one in found}


def _row(spot: Spot) -> str:
    return f"{spot[1]} · {spot[0]}"
