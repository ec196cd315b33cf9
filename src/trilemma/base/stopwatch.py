"""Seconds per stage of a round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the time spent in named stages. A stage inside another counts for itself only.

    On a CUDA `device` a stage ends when its kernels have.

    >>> watch = Stopwatch()
    >>> with watch.stage("outer"):
    ...     with watch.stage("inner"):
    ...         time.sleep(0.02)
    >>> seconds = watch.take()
    >>> seconds["inner"] >= 0.02 > seconds["outer"], watch.take()
    (True, {})
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._inside = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`."""
        before, self._inside = self._inside, 0.0
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            spent = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + spent - self._inside
            self._inside = before + spent

    def take(self) -> dict[str, float]:
        """Return what was measured since the last time, and begin anew."""
        taken = {name: round(spent, 6) for name, spent in self._seconds.items()}
        self._seconds = {}
        return taken
