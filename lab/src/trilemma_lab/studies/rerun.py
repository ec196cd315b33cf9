"""Do results still come out? Some cells of a study run once more by today's code, compared to the last digit.

That sources have changed says nothing about numbers: most changes make code faster or split a file. A run is
a function of its configuration, its seed and the kind of device, so one seed of a few cells tells: where they
are the same to the last digit, none of the changes has touched them.
"""

from __future__ import annotations

from pathlib import Path

from trilemma.base.errors import UserError
from trilemma.experiment.sweep import leaves
from trilemma.simulate import Watcher
from trilemma_lab.studies.measured import Measured, Results, alike, new_results
from trilemma_lab.studies.staleness import Rerun
from trilemma_lab.studies.study import Study, run_studies


def chosen(results: Results, count: int) -> list[Measured]:
    """Return cells that lie evenly over a file, of those whose seeds and settings are on record.

    >>> from trilemma.base.records import Spread
    >>> half = {"accuracy": Spread.of({1: 0.5})}
    >>> cells = [Measured("t", str(i), "c", half, (1,), settings={"x": 1}) for i in range(9)]
    >>> [cell.row for cell in chosen(Results("s", tuple(cells)), 3)]
    ['1', '4', '7']
    """
    able = [
        cell
        for cell in results.cells
        if cell.settings and cell.seeds and _figures(cell, cell.seeds[0]) and _of_this(cell, results)
    ]
    count = min(count, len(able))
    return [able[len(able) * (2 * i + 1) // (2 * count)] for i in range(count)]


def rerun_cells(
    name: str, study: Study, results: Results, count: int, out: Path, jobs: int | None, watcher: Watcher
) -> Results:
    """Run `count` cells once more, the first seed of each, below `out`; return the results with what came."""
    here = new_results(name, ())
    if results.device not in ("", here.device):
        raise UserError(f"{name} was run on {results.device}; {here.device} draws other numbers")
    cells = {cell.place: cell for cell in chosen(results, count)}
    seed = {place: cell.seeds[0] for place, cell in cells.items()}
    wanted = [
        place.with_(f"run.seeds=[{seed[place.at]}]")
        for place in study.places("1")
        if place.at in cells and alike(cells[place.at].settings, dict(leaves(place.config.dump())))
    ]
    if not wanted:
        raise UserError(f"no cell of {name} can be run again: what it was run with is not on record")
    found, outcome = run_studies({name: wanted}, out, jobs=jobs, watcher=watcher)
    if outcome.failed:
        cell, failure = next(iter(outcome.failed.items()))
        raise UserError(
            f"{len(outcome.failed)} of {len(wanted)} cells of {name} gave no result: {cell}: {failure.reason}"
        )
    apart = {cell.place: _apart(cells[cell.place], cell, seed[cell.place]) for cell in found[name]}
    made = new_results(name, [cells[place] for place in apart])
    again = Rerun(
        places=tuple(apart),
        same=sum(one == 0.0 for one in apart.values()),
        furthest=max(apart.values(), default=0.0),
        code=made.code,
        date=made.date,
        device=made.device,
    )
    return results.with_rerun(again, made.sources[made.code])


def _of_this(cell: Measured, results: Results) -> bool:
    """Whether a cell was run on the device that the file names, where it was run before the others."""
    return not cell.of or cell.of.startswith(f"{results.device},")


def _figures(cell: Measured, seed: int) -> dict[str, float | None]:
    """Return what one seed gave, by metric."""
    return {name: one.per_seed[str(seed)] for name, one in cell.metrics.items() if str(seed) in one.per_seed}


def _apart(then: Measured, now: Measured, seed: int) -> float:
    """Return the largest difference between both, as a share; one that diverged alone is all of it apart."""
    before, after = _figures(then, seed), _figures(now, seed)
    return max((_share(before[name], after[name]) for name in before.keys() & after.keys()), default=1.0)


def _share(before: float | None, after: float | None) -> float:
    """Return how far two figures are apart.

    >>> _share(0.5, 0.5), _share(0.5, 0.25), _share(None, 0.5), _share(None, None)
    (0.0, 0.5, 1.0, 0.0)
    """
    if before is None or after is None:
        return 0.0 if before is after else 1.0
    return 0.0 if before == after else abs(after - before) / max(abs(before), abs(after))
