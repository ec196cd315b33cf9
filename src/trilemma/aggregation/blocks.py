"""How a pass over X is cut up: fixed spans of columns, worked on by as many threads as torch uses.

The spans depend on the shape alone and partial results are added in their order, so a result does not depend
on the number of threads.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from trilemma.aggregation.types import Numpy

T = TypeVar("T")

SPAN = 1 << 14
"""Columns handed to a thread at once, and converted at once where X is in half precision."""

SMALL = 1 << 10
"""Up to so many numbers plain torch calls do, and numba need not be loaded."""


@functools.cache
def compiled() -> ModuleType | None:
    """Return the numba kernels, or None where numba is not installed."""
    try:
        return importlib.import_module("trilemma.aggregation.kernels")
    except ImportError:
        return None


def spans(d: int, device: str = "cpu") -> list[tuple[int, int]]:
    """Cut d columns into spans, sixteen times as wide where the device is not the CPU.

    >>> spans(SPAN + 1)
    [(0, 16384), (16384, 16385)]
    """
    width = SPAN if device == "cpu" else 16 * SPAN
    return [(lo, min(lo + width, d)) for lo in range(0, d, width)]


def over_spans(work: Callable[[int, int], T], d: int) -> list[T]:
    """Return [work(lo, hi) for every span], computed on torch's number of threads."""
    parts = spans(d)
    threads = min(torch.get_num_threads(), len(parts))
    if threads < 2:
        return [work(lo, hi) for lo, hi in parts]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda part: work(*part), parts))


def window(X: Tensor, lo: int, hi: int) -> tuple[Numpy, int, int]:
    """Return a float32 or float64 array with contiguous rows, and where columns lo … hi are in it.

    X itself where it qualifies, else a copy of these columns only.
    """
    if X.dtype in (torch.float32, torch.float64) and X.is_contiguous():
        return X.numpy(), lo, hi
    dtype = torch.float64 if X.dtype == torch.float64 else torch.float32
    return X[:, lo:hi].to(dtype).contiguous().numpy(), 0, hi - lo
