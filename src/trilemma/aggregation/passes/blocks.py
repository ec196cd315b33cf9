"""How a pass over X is cut up: fixed spans of columns, worked on by as many threads as torch uses.

The spans depend on the shape alone and partial results are added in their order, so a result does not depend
on the number of threads.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from trilemma.aggregation.steps.types import Numpy

T = TypeVar("T")

SPAN = 1 << 14
"""Columns that are copied at once, where a pass cannot work on X in place."""

WIDE_SPAN = 1 << 17
"""The most columns handed to a thread at once: few enough to keep threads busy to the end."""

SMALL = 1 << 10
"""Up to so many numbers plain torch calls do, and numba need not be loaded."""


@functools.cache
def compiled(name: str) -> ModuleType | None:
    """Return kernels of this room, or None where the compiler they need is missing or cannot be used.

    numba cannot be used where it may not cache what it compiles: package and home folder are read-only.
    """
    try:
        return importlib.import_module(f"trilemma.aggregation.kernels.{name}")
    except (ImportError, RuntimeError):
        return None


def spans(d: int, width: int = SPAN) -> list[tuple[int, int]]:
    """Cut d columns into spans of some width.

    >>> spans(40_000)
    [(0, 16384), (16384, 32768), (32768, 40000)]
    """
    return [(lo, min(lo + width, d)) for lo in range(0, d, width)]


def over_spans(work: Callable[[int, int], T], d: int, *, copies: bool) -> list[T]:
    """Return [work(lo, hi) for every span of d columns], computed on torch's number of threads."""
    width = SPAN if copies else min(max(SPAN, -(-d // SPAN // 16) * SPAN), WIDE_SPAN)
    parts = spans(d, width)
    threads = min(torch.get_num_threads(), len(parts))
    if threads < 2:
        try:
            return [work(lo, hi) for lo, hi in parts]
        finally:
            _own.__dict__.clear()  # threads of a pool end, and what they own with them
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda part: work(*part), parts))


def in_place(X: Tensor) -> bool:
    """Whether the kernels can read X as it is."""
    return X.dtype in (torch.float32, torch.float64) and X.is_contiguous()


def window(X: Tensor, lo: int, hi: int) -> tuple[Numpy, int, int]:
    """Return a float32 or float64 array with contiguous rows, and where columns lo … hi are in it.

    X itself where it qualifies, else a copy of these columns only, valid until this thread asks for the next.
    """
    if in_place(X):
        return X.numpy(), lo, hi
    dtype = torch.float64 if X.dtype == torch.float64 else torch.float32
    copy = _place(len(X), hi - lo, dtype)
    return copy.copy_(X[:, lo:hi]).numpy(), 0, hi - lo


_own = threading.local()


def _place(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return memory for a copy (rows, columns), the same for all copies of a thread.

    A copy of its own for every span would be freed at once, but two threads that take turns leave the C
    library's heap in pieces: up to half of X instead of a few per cent.
    """
    held = getattr(_own, "held", None)
    if held is None or held.dtype != dtype or held.numel() < rows * columns:
        held = _own.held = torch.empty(rows * columns, dtype=dtype, device="cpu")
    found: Tensor = held[: rows * columns].view(rows, columns)
    return found
