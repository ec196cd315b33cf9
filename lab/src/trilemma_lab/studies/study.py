"""A study: the runs behind a figure or a table of a paper, and what is measured in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trilemma import simulate
from trilemma.base.records import Spread
from trilemma.base.registry import Registry
from trilemma.report import Result
from trilemma.report.loading import load_cell
from trilemma.simulate import Watcher
from trilemma.simulate.sweep import Failure, Job
from trilemma_lab.papers.published import Paper
from trilemma_lab.studies.grid import SEEDS, Place, Searched, point, searched
from trilemma_lab.studies.measured import Measured, Results, best, measured, pooled
from trilemma_lab.studies.provenance import other_provenance, write_down
from trilemma_lab.studies.sources import own_tree

Measure = Callable[[Result], Mapping[str, Spread]]
"""Reads off a finished run what a paper reports of such runs."""

Compute = Callable[[bool], Sequence[Measured]]
"""Computes a study that has no runs, quickly or in full."""

Draw = Callable[[Results, Paper, Path], Path]
"""Draws what a study gave beside what was printed."""

Keep = Callable[[str, Sequence[Measured]], None]
"""Hears all that is measured of a study so far, whenever there is more of it."""


def scores(result: Result) -> Mapping[str, Spread]:
    """Return the metrics a run was scored by."""
    return result.summary.metrics


@dataclass(frozen=True)
class Study:
    """One entry of `trilemma papers`.

    `places` are its runs, for seeds written as in 1-3. `quick` says what a quick look leaves out and how: the
    places it keeps, and what it changes in their runs. `paper` names the file of published numbers. Several
    runs at one place are a paper's grid of hyper-parameters, of which it shows the best: all are tried with
    the first seed, and what was best there is run with the others. `reported` are the
    metrics of a table, by its name; of a table that is not named there, all. A study without runs, of
    formulas or of times, is computed. `draw` makes its picture, where `trilemma_lab.studies.figures` has
    another.
    """

    paper: str
    figures: str
    left_out: str
    places: Callable[[str], Sequence[Place]] = lambda seeds: ()
    kept: Callable[[Place], bool] = lambda place: True
    shorter: tuple[str, ...] = ()
    seeds: str = "1-3"
    measure: Measure = scores
    reported: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    compute: Compute | None = None
    draw: Draw | None = None

    def runs(self, seeds: str | None = None, quick: bool = False, only: str = "") -> list[Place]:
        """Return the places of a full or a quick look; with `only`, those that contain it in some name.

        Of several words with " / " between them every one must be there.

        >>> [place.column for place in studies["safe-dshb"].runs("1", only="multiplier 2 / smea")][:2]
        ['ALIE (searched)', 'FOE (searched)']
        """
        wanted = seeds or ("1" if quick else self.seeds)
        found = [place for place in self.places(wanted) if not quick or self.kept(place)]
        words = only.split(" / ")
        named = [place for place in found if all(any(word in name for name in place.at) for word in words)]
        return [place.with_(*(self.shorter if quick else ())) for place in named]

    @property
    def module(self) -> str:
        """The module that computes a study without runs."""
        return "" if self.compute is None else str(self.compute.__module__)

    @cached_property
    def grid(self) -> Sequence[Place]:
        """Every run with its first seed."""
        return self.places("1")

    @cached_property
    def order(self) -> Mapping[tuple[str, str, str], int]:
        """The number of every place."""
        return {at: i for i, at in enumerate(dict.fromkeys(place.at for place in self.grid))}

    @cached_property
    def searched(self) -> Searched:
        """The keys that are searched at each place that has a grid of hyper-parameters."""
        return searched(self.grid)

    @cached_property
    def points(self) -> Mapping[tuple[str, str, str], int]:
        """How many points the grid of each place has; 1 is no grid."""
        return Counter(place.at for place in self.grid)

    def ordered(self, results: Results) -> Results:
        """Return results in the order of the study's places, whenever each of them was run.

        >>> byz = studies["byz-clip21-figure2"]
        >>> cells = [Measured("MLP, f = 1, LF", "SAFE-DSHB", f"ε = {one}", {}) for one in (23, 8)]
        >>> [cell.column for cell in byz.ordered(Results("byz-clip21-figure2", tuple(cells))).cells]
        ['ε = 8', 'ε = 23']
        """
        last = len(self.order)
        cells = sorted(results.cells, key=lambda cell: self.order.get(cell.place, last))
        return replace(results, cells=tuple(cells))

    def read(self, places: Sequence[Place], result: Result, of: str = "") -> list[Measured]:
        """Return what one finished run gave at the places it stands in; `of` says when and by which code."""
        values = self.measure(result)
        return [
            measured(
                place,
                result,
                {name: one for name, one in values.items() if self._says(place, name)},
                of,
                point(place.settings, self.searched.get(place.at, ())),
            )
            for place in places
        ]

    def _says(self, place: Place, metric: str) -> bool:
        return metric in self.reported.get(place.table, (metric,))


studies: Registry[Study] = Registry("study")
"""Every study by its name."""


def in_order(cells: Sequence[Measured], study: str, axis: int) -> list[str]:
    """Return the rows (1) or columns (2) of a table that have cells, as the study has them.

    >>> cells = [Measured("Table 5", "RSA", column, {}) for column in ("50 %", "clean", "10 %")]
    >>> in_order(cells, "lp-proj-mnist", 2)
    ['clean', '10 %', '50 %']
    """
    there = dict.fromkeys(cell.place[axis] for cell in cells)
    known = studies[study].order if study in studies else {}
    own = dict.fromkeys(at[axis] for at in known if at[0] == cells[0].table)
    return [*(name for name in own if name in there), *(name for name in there if name not in own)]


def run_studies(
    wanted: Mapping[str, Sequence[Place]],
    out: Path,
    *,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    keep: Keep = lambda name, found: None,
) -> tuple[dict[str, list[Measured]], simulate.CellOutcome]:
    """Run the places of studies below `out`, or continue there; return what was measured, by study.

    A run that stands in several studies is run once. A place whose run failed has no measurement; the outcome
    says why. What is measured is kept as runs end, so that a study that is stopped has given what it could.
    """
    own_tree()  # what is read now is what workers are going to run, hours later too
    reader = _Reader(out, watcher or Watcher(), keep)
    outcome = reader.run({name: tried(places) for name, places in wanted.items()}, jobs)
    others = {name: remaining(places, reader.found(name)) for name, places in wanted.items()}
    if any(others.values()):
        again = reader.run(others, jobs)
        outcome = simulate.CellOutcome(
            outcome.ran + again.ran, outcome.before + again.before, {**outcome.failed, **again.failed}
        )
    return {name: reader.found(name) for name in wanted}, outcome


def tried(places: Sequence[Place]) -> list[Place]:
    """Return the runs to begin with: at a place of several the first seed alone."""
    often = Counter(place.at for place in places)
    return [seeded(place, place.config.run.seeds[:1]) if often[place.at] > 1 else place for place in places]


def remaining(places: Sequence[Place], found: Sequence[Measured]) -> list[Place]:
    """Return what is left of the places of which several were tried: the best of each, its other seeds."""
    often = Counter(place.at for place in places)
    chosen = {cell.place: settings_of(cell) for cell in found}
    return [
        seeded(place, place.config.run.seeds[1:])
        for place in places
        if often[place.at] > 1
        and place.config.run.seeds[1:]
        and chosen.get(place.at) == place.settings | {SEEDS: None}
    ]


def settings_of(cell: Measured) -> dict[str, Any]:
    """Return what a measurement was made with, its seeds left out."""
    return {**cell.settings, SEEDS: None}


def seeded(place: Place, seeds: Sequence[int]) -> Place:
    """Return the same run with other seeds."""
    return place.with_(f"run.seeds={list(seeds)}")


class _Reader(Watcher):
    """A watcher that measures runs as they end, and tells another."""

    def __init__(self, out: Path, watcher: Watcher, keep: Keep) -> None:
        super().__init__(watcher)
        self._out, self._keep = out, keep
        self._places: dict[str, dict[str, list[Place]]] = {}
        self._measured: dict[str, dict[str, list[Measured]]] = {}

    def run(self, wanted: Mapping[str, Sequence[Place]], jobs: int | None) -> simulate.CellOutcome:
        """Run places of studies, or continue them."""
        cells = {place.cell.name: place.cell for places in wanted.values() for place in places}
        for name, places in wanted.items():
            there = self._measured.setdefault(name, {})
            for place in places:
                there.setdefault(place.cell.name, [])
                self._places.setdefault(place.cell.name, {}).setdefault(name, []).append(place)
        for name in cells:
            if simulate.finished(self._out, name):
                self._read(name)
        return simulate.run_cells([*cells.values()], self._out, jobs=jobs, watcher=self)

    def ended(self, job: Job, failure: Failure | None) -> None:
        if failure is None:
            write_down(self._out / job.name, self._settings(job.name))
            for name in self._read(job.name):
                self._keep(name, self.found(name))
        super().ended(job, failure)

    def found(self, name: str) -> list[Measured]:
        """What is measured of a study so far, in the order of its places."""
        return best(pooled([one for cell in self._measured[name].values() for one in cell]))

    def _read(self, cell: str) -> list[str]:
        """Measure a finished run; return the studies it belongs to."""
        result = load_cell(self._out / cell)
        of = other_provenance(self._out / cell, self._settings(cell))
        for name, places in self._places[cell].items():
            self._measured[name][cell] = studies[name].read(places, result, of)
        return [*self._places[cell]]

    def _settings(self, cell: str) -> dict[str, Any]:
        """Return what a run is made with."""
        place = next(one for places in self._places[cell].values() for one in places)
        return place.settings
