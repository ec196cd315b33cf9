"""Cells run in worker processes of this machine.

A worker is a fresh process (spawn) that runs one job after another and keeps the data it has loaded. If it
dies during a job, for example out of memory, a new worker takes its place and the cell is tried once more,
from its checkpoint. If that worker dies too, the cell has failed. A worker whose parent process is gone saves
a checkpoint and ends; if it is inside a long call, it ends without, and the previous checkpoint is used.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil
import torch

from trilemma.simulate.sweep.work import Failure, Job, Watcher, work

PATIENCE = 30.0
"""Seconds that workers have to save their checkpoints after Ctrl-C."""

GRACE = 10.0
"""Seconds that a worker has to save its checkpoint before it ends itself because its parent is gone."""


def run_jobs(jobs: Sequence[Job], at_once: int | None, watcher: Watcher) -> None:
    """Run all jobs, even if some fail, `at_once` at a time; None: one per core, one if there is a GPU."""
    cores = (
        len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count() or 1
    )
    usual = 1 if torch.cuda.is_available() else cores
    count = min(len(jobs), usual if at_once is None else at_once)
    _Pool(list(jobs), count, max(1, cores // count), watcher).run()


@dataclass
class _Worker:
    """A worker process, its current job (None: idle), and the `data` set it has in memory."""

    number: int
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None
    data: str = ""


@dataclass
class _Pool:
    waiting: list[Job]
    count: int
    threads: int
    watcher: Watcher
    workers: dict[int, _Worker] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    """For every cell, how often a worker died while it ran."""

    def run(self) -> None:
        """Run all cells; on Ctrl-C workers save what they are at."""
        before, told = signal.getsignal(signal.SIGINT), _remembered(signal.SIGINT)
        try:
            for number in range(self.count):
                self._hire(number)
            while any(worker.job for worker in self.workers.values()):
                ready = wait([worker.pipe for worker in self.workers.values()], timeout=1.0)
                if told.is_set():
                    raise KeyboardInterrupt
                for worker in [one for one in self.workers.values() if one.pipe in ready]:
                    self._hear(worker)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, before)
            self._dismiss()

    def _hire(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, self.threads), daemon=True)
        process.start()
        there.close()  # so that this end gets EOF when the worker is gone
        self.workers[number] = worker = _Worker(number, process, here)
        self._send(worker)

    def _send(self, worker: _Worker) -> None:
        """Send a worker its next cell, preferably one whose data it has in memory."""
        worker.job = None
        if not self.waiting:
            return
        job = next((job for job in self.waiting if job.data == worker.data), self.waiting[0])
        self.waiting.remove(job)
        worker.job, worker.data = job, job.data
        self.watcher.started(job, worker.number)
        with contextlib.suppress(OSError):  # it is gone; `_hear` notices that next
            worker.pipe.send(job)

    def _hear(self, worker: _Worker) -> None:
        """Take in what a worker says: rounds it has done, or how its cell ended; or that it died."""
        try:
            said: Any = worker.pipe.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        job = worker.job
        assert job is not None
        if isinstance(said, int):
            self.watcher.moved(job, said)
        else:
            self.watcher.ended(job, said)
            self._send(worker)

    def _replace(self, worker: _Worker) -> None:
        """Replace a worker that has died, and try its cell once more."""
        worker.process.join()
        worker.pipe.close()
        del self.workers[worker.number]
        job = worker.job
        if job is not None:
            self.lost[job.name] = self.lost.get(job.name, 0) + 1
            if self.lost[job.name] > 1:
                how = _ending(worker.process.exitcode)
                self.watcher.ended(job, Failure(f"its worker process ended twice, {how}"))
            else:
                self.waiting.insert(0, job)
        if self.waiting:
            self._hire(worker.number)

    def _dismiss(self) -> None:
        """End all workers; those at work save a checkpoint first."""
        for worker in self.workers.values():
            if worker.job is not None:
                worker.process.terminate()
            worker.pipe.close()
        for worker in self.workers.values():
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()


def _remembered(number: signal.Signals) -> threading.Event:
    """Let a signal raise `KeyboardInterrupt`, and return an event that is set when it came.

    The exception may be raised in a callback in which Python ignores all errors, so the caller also polls the
    event. Only the main thread receives signals: in other threads nothing is changed.
    """
    told = threading.Event()

    def interrupt(_number: int, _frame: object) -> None:
        told.set()
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(number, interrupt)
    return told


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (out of memory?)" if -code == 9 else ""
        return f"by signal {-code}{hint}"
    return f"with exit code {code}"


def serve(pipe: Connection, threads: int) -> None:
    """Be a worker: run jobs from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, but the parent decides
    told = _remembered(signal.SIGTERM)  # raises KeyboardInterrupt, on which the run saves a checkpoint
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(min(threads, torch.get_num_threads()))

    def say(rounds: int) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        pipe.send(rounds)

    try:
        while True:
            job: Job = pipe.recv()
            pipe.send(work(job, say))
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _end_with_parent() -> None:
    """Wait until the parent process is gone, then end this one.

    The wait is on a pipe that only the parent holds open, which works on every system. First the run is
    interrupted, to save its checkpoint. Python handles an interrupt only between two bytecodes, so a process
    inside a long call, or one that ignored the interrupt, is ended after `GRACE` seconds.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
