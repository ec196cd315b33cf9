"""How much of a study there is: places of its tables that have a result, and those that have all seeds."""

from __future__ import annotations

from dataclasses import dataclass

from trilemma.config import parse_seeds
from trilemma.papers.measured import Measured, Results
from trilemma.papers.study import Study


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


def altogether(tables: dict[str, Filled]) -> Filled:
    """Return how much there is of all tables."""
    found = tables.values()
    return Filled(sum(t.places for t in found), sum(t.there for t in found), sum(t.whole for t in found))


def _count(cells: list[Measured | None], wanted: int) -> Filled:
    found = [cell for cell in cells if cell is not None]
    return Filled(len(cells), len(found), sum(len(cell.seeds) >= wanted for cell in found))
