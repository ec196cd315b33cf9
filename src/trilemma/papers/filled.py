"""How much of a study there is: places that have a result, those that have all seeds, what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trilemma.config import parse_seeds
from trilemma.config.sweep import leaves
from trilemma.papers.grid import Place
from trilemma.papers.measured import Measured, Results, alike
from trilemma.papers.study import Study, seeded


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

    Where several were tried at a place, more seeds are run of the one that is shown. A place whose settings
    are not on record, or are those of no run any more, is run with all its seeds.
    """
    there = {cell.place: cell for cell in results.cells if cell.metrics}
    shown = {place.at for place in places if place.at in there and _is(place, there[place.at])}
    left = []
    for place in places:
        cell = there.get(place.at)
        more = [seed for seed in place.config.run.seeds if cell is None or seed not in cell.seeds]
        if cell is None or (more and place.at not in shown):
            left.append(place)
        elif more and _is(place, cell):
            left.append(seeded(place, more))
    return left


def _is(place: Place, cell: Measured) -> bool:
    return alike(cell.settings, dict(leaves(place.config.dump())))


def altogether(tables: dict[str, Filled]) -> Filled:
    """Return how much there is of all tables."""
    found = tables.values()
    return Filled(sum(t.places for t in found), sum(t.there for t in found), sum(t.whole for t in found))


def _count(cells: list[Measured | None], wanted: int) -> Filled:
    found = [cell for cell in cells if cell is not None]
    return Filled(len(cells), len(found), sum(len(cell.seeds) >= wanted for cell in found))
