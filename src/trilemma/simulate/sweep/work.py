"""The work of a sweep's worker: run one cell in its directory, or continue it there; and its watchers."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trilemma.base import recordings
from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.experiment import Config, parse
from trilemma.simulate.runner import run_or_resume
from trilemma.task import Task

TELL_EVERY = 0.2
"""Least seconds between two reports of a cell's finished rounds."""


@dataclass(frozen=True)
class Job:
    """A cell as plain values, so that it can be sent to any process.

    `rounds` counts the rounds of all seeds. `data` identifies the data set, so that a worker can be given a
    cell whose data it has in memory. `task` is the path of a task's file, if there is one.
    """

    name: str
    label: str
    folder: str
    source: Mapping[str, Any]
    rounds: int
    data: str
    task: str | None = None


@dataclass(frozen=True)
class Failure:
    """Why a cell has no result: the `reason` in one sentence, and the traceback if it was unexpected."""

    reason: str
    trace: str = ""


class Watcher:
    """Is told about a sweep while it runs, and tells `others`; without any it does nothing."""

    def __init__(self, *others: Watcher) -> None:
        self._others = others

    def waits(self, jobs: Sequence[Job]) -> None:
        """These are the cells to be run: those that are not finished."""
        for other in self._others:
            other.waits(jobs)

    def started(self, job: Job, worker: int) -> None:
        """A worker takes a cell."""
        for other in self._others:
            other.started(job, worker)

    def moved(self, job: Job, rounds: int) -> None:
        """So many of the cell's rounds are done, all seeds together."""
        for other in self._others:
            other.moved(job, rounds)

    def ended(self, job: Job, failure: Failure | None) -> None:
        """A cell is finished, or has failed."""
        for other in self._others:
            other.ended(job, failure)


def work(job: Job, tell: Callable[[int], None]) -> Failure | None:
    """Run a cell to its end; return None, or why it failed. `tell` is called with the rounds done so far.

    The process keeps the data set, the task and compiled kernels in memory for its next cell.
    """
    try:
        _run(job, tell)
    except UserError as error:
        return Failure(str(error))
    except Exception as error:
        said = traceback.format_exception_only(error)[-1].strip()
        return Failure(said, traceback.format_exc())
    return None


def _run(job: Job, tell: Callable[[int], None]) -> None:
    settings = parse(job.source)
    _of_shapes(_shapes(settings))
    folder = Path(job.folder)
    if folder.exists() and not (folder / "config.toml").exists():
        shutil.rmtree(folder)  # the process was killed before the run began
    task = None if job.task is None else _task(job.task, settings.federation.clients)
    run_or_resume(settings, folder, _Told(settings, tell), task)


def _shapes(settings: Config) -> str:
    """Return all that decides the shapes of a run's tensors; cells with the same can share recordings."""
    data, model = settings.data, settings.model
    which = (settings.features, settings.holding.project, settings.coordinates, settings.algorithm.name)
    return repr((data, model, which, settings.federation.clients))


@lru_cache(maxsize=1)
def _of_shapes(shapes: str) -> None:
    """Free the memory of recordings, unless the last cell of this process had the same shapes (the cache)."""
    recordings.forget()


@lru_cache(maxsize=1)
def _task(path: str, clients: int) -> Task:
    return Task.from_file(path).of(clients)


class _Told:
    """An observer that reports the finished rounds of all seeds, at most every `TELL_EVERY` seconds."""

    def __init__(self, settings: Config, tell: Callable[[int], None]) -> None:
        self._seeds, self._rounds = settings.run.seeds, settings.run.rounds
        self._before, self._tell, self._last = 0, tell, 0.0

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        self._before = self._seeds.index(seed) * self._rounds
        self._say(first_round)

    def round_finished(self, record: Record) -> None:
        if time.monotonic() - self._last >= TELL_EVERY:
            self._say(record.round)

    def _say(self, rounds: int) -> None:
        self._last = time.monotonic()
        self._tell(self._before + rounds)
