"""Times that can be compared: actions take turns on one machine, and the best of each counts.

A time only means something beside another one taken on the same machine at the same time. What else the
machine does then meets all actions alike, and the least of several times is the one it met least.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Best:
    """The least of several times of one action.

    `busy` is processor time, which other programs disturb less; it says nothing of a CUDA device's work.
    """

    seconds: float
    busy: float


def take_turns(
    actions: Mapping[str, Callable[[], object]],
    repeats: int,
    device: str = "cpu",
    patience: float = math.inf,
    warm: bool = False,
) -> dict[str, Best]:
    """Run every action in turn, `repeats` times; return the best times.

    The first round does not count, unless everything is `warm` already. After `patience` seconds a round that
    counts is the last.
    """
    best = dict.fromkeys(actions, Best(math.inf, math.inf))
    given_up = time.perf_counter() + patience
    for turn in range(warm, repeats + 1):
        for name, action in actions.items():
            took = timed(action, device)
            if turn:
                best[name] = Best(min(best[name].seconds, took.seconds), min(best[name].busy, took.busy))
        if turn and time.perf_counter() > given_up:
            break
    return best


def timed(action: Callable[[], object], device: str = "cpu") -> Best:
    """Run an action once, to the end of what it asked of the device."""
    _finish(device)
    begin, busy = time.perf_counter(), time.process_time()
    action()
    _finish(device)
    return Best(time.perf_counter() - begin, time.process_time() - busy)


def alone(action: Callable[[], object], repeats: int, device: str = "cpu") -> Best:
    """Return the best time of a single action."""
    return take_turns({"": action}, repeats, device)[""]


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
