"""Sweeps: every cell of a grid is run in its own run directory, and a failure does not stop the others.

    OUT/sweep.json             the cells: the values of their keys, in order
    OUT/0f3a…/                 the run of a cell, named by a hash of its configuration (`simulate.directory`)
    OUT/failed/0f3a….json      why a cell has no result; removed when it has one

A cell with a summary is finished and is not run again. A cell that was stopped continues from its checkpoint
to the same model. A cell that failed is tried again by the next sweep. Processes of this machine run cells.
"""

from trilemma.simulate.sweep.grid import (
    CellOutcome,
    check_device,
    failures,
    finished,
    known_cells,
    run_cells,
)
from trilemma.simulate.sweep.work import Failure, Job, Watcher

__all__ = [
    "CellOutcome",
    "Failure",
    "Job",
    "Watcher",
    "check_device",
    "failures",
    "finished",
    "known_cells",
    "run_cells",
]
