"""The Ray engine: cells run on a cluster whose machines share a file system with this one.

The cluster is the one this process is connected to, or that RAY_ADDRESS names; otherwise Ray is started here.
A cell takes one core and, if the cluster has GPUs, their number divided by the cells at a time, one at most.
If the process or the machine that runs a cell is lost, Ray runs it once more, from its checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trilemma.base.errors import UserError
from trilemma.simulate.sweep.work import Failure, Job, Watcher, work

LOOK_EVERY = 1.0
"""Seconds between two checks of the cells' progress."""


def run_jobs(jobs: Sequence[Job], at_once: int | None, watcher: Watcher) -> None:
    """Run jobs on Ray, `at_once` at a time; None: as many as the cluster has GPUs, or else cores."""
    ray = _ray()
    mine = not ray.is_initialized()
    if mine:
        named = os.environ.get("RAY_ADDRESS")
        here = {} if named else {"num_cpus": at_once, "include_dashboard": False}
        ray.init(address=named, log_to_driver=False, **here)
    try:
        _run(ray, list(jobs), at_once, watcher)
    finally:
        if mine:
            ray.shutdown()


def _run(ray: Any, waiting: list[Job], at_once: int | None, watcher: Watcher) -> None:
    """Keep as many cells running as the cluster has GPUs, or else cores, until all have ended."""
    there = ray.cluster_resources()
    gpus = there.get("GPU", 0)
    count = min(len(waiting), at_once or max(1, int(gpus or there.get("CPU", 1))))
    # max_calls=0: a worker stays after its cell is done, with the data set and the kernels it has loaded.
    remote = ray.remote(num_cpus=1, num_gpus=min(1.0, gpus / count), max_retries=1, max_calls=0)(_work)
    running: dict[Any, tuple[int, Job]] = {}
    free = list(range(count))
    try:
        while waiting or running:
            while waiting and free:
                job, worker = waiting.pop(0), free.pop(0)
                watcher.started(job, worker)
                running[remote.remote(job)] = (worker, job)
            done, _ = ray.wait(list(running), timeout=LOOK_EVERY)
            for reference in done:
                worker, job = running.pop(reference)
                watcher.ended(job, _result(ray, reference))
                free.append(worker)
            for _, job in running.values():
                watcher.moved(job, _rounds(Path(job.folder)))
    except KeyboardInterrupt:
        for reference in running:
            ray.cancel(reference)  # raises KeyboardInterrupt there, on which the run saves a checkpoint
        ray.wait(list(running), num_returns=len(running), timeout=30)
        raise


def _work(job: Job) -> Failure | None:
    import torch

    torch.set_num_threads(1)
    return work(job, lambda rounds: None)


def _result(ray: Any, reference: Any) -> Failure | None:
    try:
        found: Failure | None = ray.get(reference)
    except ray.exceptions.RayError as error:
        return Failure(f"lost twice: {str(error).strip().splitlines()[0]}", str(error))
    return found


def _rounds(folder: Path) -> int:
    """Return the number of rounds whose records are written, over all seeds."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("seed-*/metrics.jsonl"))


def check_installed() -> None:
    """Raise a `UserError` if Ray is not installed."""
    _ray()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError(
            "--engine ray needs Ray: pip install 'trilemma[ray]'; --engine local does not"
        ) from None
    return ray
