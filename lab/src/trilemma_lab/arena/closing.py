"""Run what the arena lacks: what each cell is to meet next, then what that leaves open, until all is done.

A cell that somebody brings to chance is not run again, so what is most telling for its price comes first
(`missing`). What has ended is in the file of rows within seconds. Ctrl-C, the end of the time given, and a
crash lose no finished cell: the same call goes on.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trilemma import simulate
from trilemma.simulate.sweep import Failure, Job, Watcher
from trilemma_lab.arena import arena, missing
from trilemma_lab.arena.arena import Bout, Row

WRITTEN = 10.0
"""Seconds between two times that the file is written."""


@dataclass(frozen=True)
class Closed:
    """What became of it: new rows, cells that failed and why, what is not defined, whether all was run."""

    rows: tuple[Row, ...]
    failed: dict[str, Failure]
    refused: tuple[str, ...]
    ended: bool


class _Recorder(Watcher):
    """A watcher that puts the rows of every cell into the file soon after it ended."""

    def __init__(
        self, watcher: Watcher, path: Path, out: Path, bouts: Sequence[Bout], late: threading.Event
    ) -> None:
        super().__init__(watcher)
        self._path, self._out, self._late = path, out, late
        self._left = {bout.cell.name: bout for bout in bouts}
        self._waiting: list[Row] = []
        self._last = time.monotonic()
        self.rows: list[Row] = []

    def started(self, job: Job, worker: int) -> None:
        if self._late.is_set():  # the time was over when nobody could be interrupted
            raise KeyboardInterrupt
        super().started(job, worker)

    def ended(self, job: Job, failure: Failure | None) -> None:
        super().ended(job, failure)
        if failure is None:
            self._waiting += arena.rows([self._left.pop(job.name)], self._out)
        if time.monotonic() - self._last >= WRITTEN:
            self._write()

    def finish(self) -> None:
        """Write the rest, with cells that were finished before anybody watched."""
        self._waiting += arena.rows(self._left.values(), self._out)
        self._left = {}
        self._write()

    def _write(self) -> None:
        if self._waiting:
            arena.record(self._path, self._waiting)
        self.rows += self._waiting
        self._waiting, self._last = [], time.monotonic()


def close(
    path: Path,
    out: Path,
    watched: Callable[[], AbstractContextManager[Watcher]],
    *,
    wanted: Callable[[missing.CellStanding], bool] = lambda one: True,
    adversaries: Sequence[str] = (),
    changes: Sequence[str] = (),
    jobs: int | None = None,
    minutes: float | None = None,
) -> Closed:
    """Run what the rows in `path` lack and put it there; `watched` makes a watcher of one pass.

    A pass runs one more adversary in every cell that is incomplete; a cell that fails is not tried twice.
    """
    found = arena.read(path) if path.exists() else []
    asked: set[str] = set()
    new: list[Row] = []
    failed: dict[str, Failure] = {}
    reasons: list[str] = []
    with limited(minutes) as late:
        try:
            while True:
                said = missing.next_bouts(found, wanted, adversaries, changes, reasons.append)
                due = [bout for bout in said if bout.cell.name not in asked]
                if not due:
                    return Closed(tuple(new), failed, tuple(dict.fromkeys(reasons)), True)
                asked |= {bout.cell.name for bout in due}
                with watched() as watcher:
                    recorder = _Recorder(watcher, path, out, due, late)
                    try:
                        cells = [bout.cell for bout in due]
                        failed |= simulate.run_cells(cells, out, jobs=jobs, watcher=recorder).failed
                    finally:
                        recorder.finish()
                        new += recorder.rows
                found += recorder.rows
        except KeyboardInterrupt:
            if not late.is_set():
                raise
    return Closed(tuple(new), failed, tuple(dict.fromkeys(reasons)), False)


@contextmanager
def limited(minutes: float | None) -> Iterator[threading.Event]:
    """Interrupt this process, as Ctrl-C does, when the time is over; the event says that it was the time."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        _thread.interrupt_main()

    timer = threading.Timer((minutes or 0) * 60, stop)
    timer.daemon = True
    if minutes is not None:
        timer.start()
    try:
        yield late
    finally:
        timer.cancel()
