"""From paying until the answer is on disk: nothing interrupts a client but the end of its process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from trilemma.federation.protocol.reasons import note_down
from trilemma.learning.steps.total import Failures


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off signals that this process answers by raising something, until the end.

    What is raised meanwhile then comes from a task's own code, and counts as its failure. Signals reach a
    process's first thread only.
    """
    before: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {}
    came: list[int] = []

    def later(number: int, frame: FrameType | None) -> None:
        came.append(number)

    if threading.current_thread() is threading.main_thread():
        for one in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(one)
            if callable(handler):
                before[one] = handler
                signal.signal(one, later)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if came:
        signal.raise_signal(came[0])


def tell_owner(log: Path, what: str, failures: Failures) -> None:
    """Write into a client's own log, and nowhere else, how much of its data counted as zero, and why."""
    if failures.why:
        count = int(failures.counts.sum())
        with suppress(Exception):  # nor may this be what others see
            note_down(log, f"{what}: {count} times something counted as zero, first for this: {failures.why}")
