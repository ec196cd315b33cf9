"""Live progress bars: of a run (seed, round, the first metric, ε) and of a grid of runs; time left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trilemma.base.records import Record
from trilemma.simulate.sweep import Failure, Job, Watcher

DRAWN = 2
"""How often bars are drawn in a second: it is the runs that are to have the processor."""


class _Shown:
    """Something with a bar that is shown while it is entered."""

    _bar: Progress

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class ProgressBar(_Shown):
    """An observer (`simulate.Observer`) that draws one bar per seed on standard error."""

    def __init__(self, console: Console, label: str = "") -> None:
        self.label = label
        self._score = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=DRAWN,
        )
        self._task: TaskID | None = None

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        """Start a new bar."""
        self._score = ""
        description = f"{self.label} seed {seed}".strip()
        self._task = self._bar.add_task(description, total=rounds, completed=first_round, facts="")

    def round_finished(self, record: Record) -> None:
        """Move the bar."""
        name, score = next(((n, s) for n, s in record.metrics.items() if n != "loss"), ("", None))
        if score is not None:
            self._score = f"accuracy {score:.1%}  " if name == "accuracy" else f"{name} {score:.3g}  "
        by = f" by {record.accountant}" if record.accountant else ""
        epsilon = "∞" if record.epsilon == math.inf else f"{record.epsilon:.3g}{by}"
        facts = f"{self._score}ε {epsilon}"
        assert self._task is not None
        self._bar.update(self._task, completed=record.round, facts=facts)


class GridProgress(_Shown, Watcher):
    """A watcher of a sweep: a bar for the grid, one for each cell that is running.

    The bar of the grid counts rounds, so that the time left is right where cells differ in length; cells that
    were finished before take no time and are left out of it.
    """

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            refresh_per_second=DRAWN,
        )
        self._left: dict[str, int] = {}
        self._rounds: dict[str, int] = {}
        self._running: dict[str, TaskID] = {}
        self._ended, self._failed = 0, 0
        self._grid: TaskID | None = None

    def waits(self, jobs: Sequence[Job]) -> None:
        """These are the cells that have to be run."""
        self._left = {job.name: job.rounds for job in jobs}
        self._grid = self._bar.add_task(self._title, total=sum(self._left.values()))

    def started(self, job: Job, worker: int) -> None:
        """Draw a bar for the cell."""
        self._running[job.name] = self._bar.add_task(f"  {job.label}", total=job.rounds)

    def moved(self, job: Job, rounds: int) -> None:
        """Move the cell's bar, and the grid's."""
        self._rounds[job.name] = rounds
        if job.name in self._running:
            self._bar.update(self._running[job.name], completed=rounds)
        self._draw()

    def ended(self, job: Job, failure: Failure | None) -> None:
        """Take the cell's bar away; a failure is told at once."""
        self._ended += 1
        self._rounds[job.name] = job.rounds
        if job.name in self._running:
            self._bar.remove_task(self._running.pop(job.name))
        if failure is not None:
            self._failed += 1
            self._bar.console.print(f"failed: {job.label}: {failure.reason}", highlight=False, markup=False)
        self._draw()

    @property
    def _title(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._ended} of {len(self._left)} cells{failed}"

    def _draw(self) -> None:
        assert self._grid is not None
        self._bar.update(self._grid, description=self._title, completed=sum(self._rounds.values()))
