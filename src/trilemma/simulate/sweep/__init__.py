"""Sweeps: every cell of a grid is run in its own run directory, and a failure does not stop the others.

    OUT/sweep.json             the cells: the values of their keys, in order
    OUT/0f3a…/                 the run of a cell, named by a hash of its configuration (`simulate.directory`)
    OUT/failed/0f3a….json      why a cell has no result; removed when it has one

A cell with a summary is finished and is not run again. A cell that was stopped continues from its checkpoint
to the same model. A cell that failed is tried again by the next sweep. An *engine* runs the cells: `local` in
processes of this machine, `ray` on a cluster.
"""

from trilemma.simulate.sweep.grid import (
    ENGINES,
    CellOutcome,
    check_engine,
    failures,
    finished,
    known_cells,
    run_cells,
)
from trilemma.simulate.sweep.work import Failure, Job, Watcher

__all__ = [
    "ENGINES",
    "CellOutcome",
    "Failure",
    "Job",
    "Watcher",
    "check_engine",
    "failures",
    "finished",
    "known_cells",
    "run_cells",
]
