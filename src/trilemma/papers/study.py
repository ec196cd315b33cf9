"""A study: the runs behind a figure or a table of a paper, and what is measured in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilemma import simulate
from trilemma.papers.grid import Place
from trilemma.papers.measured import Measured, measured
from trilemma.records import Spread
from trilemma.registry import Registry
from trilemma.report import Result, load
from trilemma.simulate import Watcher

Measure = Callable[[Result], Mapping[str, Spread]]
"""Reads off a finished run what a paper reports of such runs."""


def scores(result: Result) -> Mapping[str, Spread]:
    """Return the metrics a run was scored by."""
    return result.summary.metrics


@dataclass(frozen=True)
class Study:
    """One entry of `trilemma papers`.

    `places` are its runs, for seeds written as in 1-3. `quick` says what a quick look leaves out and how: the
    places it keeps, and what it changes in their runs. `paper` names the file of published numbers.
    """

    paper: str
    figures: str
    places: Callable[[str], Sequence[Place]]
    left_out: str
    kept: Callable[[Place], bool] = lambda place: True
    shorter: tuple[str, ...] = ()
    seeds: str = "1-3"
    measure: Measure = scores

    def runs(self, seeds: str | None = None, quick: bool = False, only: str = "") -> list[Place]:
        """Return the places of a full or a quick look; with `only`, those that contain it in some name."""
        wanted = seeds or ("1" if quick else self.seeds)
        found = [place for place in self.places(wanted) if not quick or self.kept(place)]
        named = [p for p in found if any(only in name for name in (p.table, p.row, p.column))]
        return [place.with_(*(self.shorter if quick else ())) for place in named]


studies: Registry[Study] = Registry("study")
"""Every study by its name."""


def run_study(
    name: str,
    places: Sequence[Place],
    out: Path,
    *,
    jobs: int | None = None,
    engine: str = "local",
    watcher: Watcher | None = None,
) -> tuple[list[Measured], simulate.Outcome]:
    """Run the places of a study below `out`, or continue there; return what was measured.

    A place whose run failed has no measurement; the outcome says why.
    """
    cells = {place.cell.name: place.cell for place in places}
    outcome = simulate.run_cells([*cells.values()], out, jobs=jobs, engine=engine, watcher=watcher)
    measure = studies[name].measure
    done = {cell: load(out / cell) for cell in cells if cell not in outcome.failed}
    values = {cell: measure(result) for cell, result in done.items()}
    found = [
        measured(place, done[place.cell.name], values[place.cell.name])
        for place in places
        if place.cell.name in done
    ]
    return found, outcome
