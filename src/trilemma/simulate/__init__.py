"""The simulator: n clients on one machine, in run directories that survive crashes.

>>> import tempfile, pathlib
>>> from trilemma import config, simulate
>>> settings = config.parse({}, ["run.rounds=3"])
>>> summary = simulate.run(settings, pathlib.Path(tempfile.mkdtemp()) / "run")
>>> 0 <= summary.accuracy.mean <= 1
True
"""

from trilemma.base.records import Record, Spread, Summary
from trilemma.simulate.directory import RunDirectory, fresh_directory, named_directory
from trilemma.simulate.engine import Diverged, Progress, latest_model, start, step
from trilemma.simulate.evaluation import Evaluation, Fairness, evaluate
from trilemma.simulate.experiment import Experiment, SimulatedClients, assemble, settled
from trilemma.simulate.observers import Everyone, Observer, figures
from trilemma.simulate.ranks import Ranks, joined, left
from trilemma.simulate.runner import resume, run, run_or_resume, without_liars
from trilemma.simulate.sweep import CellOutcome, Watcher, finished, run_cells

__all__ = [
    "CellOutcome",
    "Diverged",
    "Evaluation",
    "Everyone",
    "Experiment",
    "Fairness",
    "Observer",
    "Progress",
    "Ranks",
    "Record",
    "RunDirectory",
    "SimulatedClients",
    "Spread",
    "Summary",
    "Watcher",
    "assemble",
    "evaluate",
    "figures",
    "finished",
    "fresh_directory",
    "joined",
    "latest_model",
    "left",
    "named_directory",
    "resume",
    "run",
    "run_cells",
    "run_or_resume",
    "settled",
    "start",
    "step",
    "without_liars",
]
