"""How much of a study there is: places that have a result, those that have all seeds, what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trilemma.experiment import parse_seeds
from trilemma_lab.studies.grid import SEEDS, Place, Searched, point, searched
from trilemma_lab.studies.measured import Measured, Results, alike
from trilemma_lab.studies.study import Study, seeded


@dataclass(frozen=True)
class Filled:
    """Places of a table, or of all: how many there are, have a result, and have it with all seeds.

    >>> Filled(15, 6, 4).words, Filled(9, 9, 9).words
    ('6 of 15, 4 with all seeds', 'all 9')
    """

    places: int
    there: int
    whole: int

    @property
    def words(self) -> str:
        """Say it."""
        there = f"{self.there} of {self.places}" if self.there < self.places else f"all {self.places}"
        return there if self.whole == self.there else f"{there}, {self.whole} with all seeds"


def filled(study: Study, results: Results) -> dict[str, Filled]:
    """Return how much there is of each table of a study with runs; that a run diverged is a result."""
    there = {cell.place: cell for cell in results.cells if cell.metrics}
    wanted = len(parse_seeds(study.seeds))
    tables: dict[str, list[Measured | None]] = {}
    for at in study.order:
        tables.setdefault(at[0], []).append(there.get(at))
    return {table: _count(cells, wanted) for table, cells in tables.items()}


def missing(places: Sequence[Place], results: Results) -> list[Place]:
    """Return the runs that results lack: places without one, and the seeds that others have not.

    Of a grid of which some points were tried the others come first, with a seed that is there to compare
    them by; where all were, or it is not on record which, more seeds are run of the one that is shown. A
    place whose settings are not on record, or are those of no run any more, is run with all its seeds.
    """
    there = {cell.place: cell for cell in results.cells if cell.metrics}
    shown = {place.at for place in places if place.at in there and _same_run(place, there[place.at])}
    grids = searched(places)
    unfinished = {place.at for place in places if _untried(place, there.get(place.at), grids)}
    left = []
    for place in places:
        cell = there.get(place.at)
        more = [seed for seed in place.config.run.seeds if cell is None or seed not in cell.seeds]
        if cell is None or (more and place.at not in shown):
            left.append(place)
        elif place.at in unfinished:
            if _untried(place, cell, grids):
                left.append(seeded(place, _to_compare(place, cell)))
        elif more and _same_run(place, cell):
            left.append(seeded(place, more))
    return left


def _untried(place: Place, cell: Measured | None, grids: Searched) -> bool:
    """Whether others of the place's grid were tried, and this one was not."""
    if cell is None or not cell.tried:
        return False
    return place.at in grids and point(place.settings, grids[place.at]) not in cell.tried


def _to_compare(place: Place, cell: Measured) -> list[int]:
    """Return the first seed of those that what is shown has too, or else the first."""
    seeds = place.config.run.seeds
    return [next((seed for seed in seeds if seed in cell.seeds), seeds[0])]


def settled(places: Sequence[Place], results: Results) -> list[Place]:
    """Return the places with one point of each grid: the one that is shown, or was best nearby.

    Nearby is the place of the same row that has a result and whose settings differ in the fewest keys, and in
    those by the smallest factors; another column counts as one key more, and so does a grid of which only one
    point was tried. A grid that has no such neighbour stays whole.
    """
    grids = searched(places)
    known = [cell for cell in results.cells if cell.metrics and cell.settings]
    rows: dict[str, list[Measured]] = {}
    for cell in known:
        rows.setdefault(cell.row, []).append(cell)
    own: dict[tuple[str, str, str], list[Place]] = {}
    for place in places:
        own.setdefault(place.at, []).append(place)
    there = {cell.place: cell for cell in known}
    chosen: list[Place] = []
    for at, runs in own.items():
        if at not in grids:
            chosen += runs
            continue
        near = [there[at]] if at in there else _by_distance(runs[0], rows.get(at[1], []), grids[at])
        names = {point(run.settings, grids[at]): run for run in runs}
        found = (names.get(point(cell.settings, grids[at])) for cell in near)
        best = next((run for run in found if run is not None), None)
        chosen += runs if best is None else [best]
    return chosen


def _by_distance(place: Place, cells: Sequence[Measured], keys: Sequence[str]) -> list[Measured]:
    """Return cells, the nearest first; the keys that are searched do not count."""
    here = {key: value for key, value in place.settings.items() if key not in (SEEDS, *keys)}
    return sorted(cells, key=lambda cell: _distance(here, place.column, cell))


def _distance(here: Mapping[str, Any], column: str, cell: Measured) -> tuple[int, float]:
    """Return how far a cell is: in keys that differ, and then by the factors in which they do."""
    apart = [key for key, value in here.items() if key in cell.settings and cell.settings[key] != value]
    factors = sum(_factor(here[key], cell.settings[key]) for key in apart)
    return len(apart) + (cell.column != column) + (len(cell.tried) == 1), factors


def _factor(one: object, other: object) -> float:
    """Return by what factor two values differ, as a logarithm; what has none counts as one of e.

    >>> round(_factor(2, 8), 3), _factor("cnn", "mlp"), _factor(0, 5)
    (1.386, 1.0, 1.0)
    """
    if isinstance(one, int | float) and isinstance(other, int | float) and one > 0 and other > 0:
        return abs(math.log(one / other))
    return 1.0


def partly_searched(study: Study, cells: Sequence[Measured]) -> list[Measured]:
    """Return the cells that show the best of some points of their grid, not of all."""
    return [cell for cell in cells if 0 < len(cell.tried) < study.points.get(cell.place, 1)]


def _same_run(place: Place, cell: Measured) -> bool:
    """Whether a cell shows this run, and not another of the place's grid, or one of other settings."""
    return alike(cell.settings, place.settings)


def altogether(tables: dict[str, Filled]) -> Filled:
    """Return how much there is of all tables."""
    found = tables.values()
    return Filled(sum(t.places for t in found), sum(t.there for t in found), sum(t.whole for t in found))


def _count(cells: list[Measured | None], wanted: int) -> Filled:
    found = [cell for cell in cells if cell is not None]
    return Filled(len(cells), len(found), sum(len(cell.seeds) >= wanted for cell in found))
