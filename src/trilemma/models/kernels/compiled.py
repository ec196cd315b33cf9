"""Finds GPU kernels that need Triton, which torch brings along where it is built for CUDA on Linux."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from torch import Tensor

STEP = 32
"""Channels come in multiples of so many where kernels are to take them."""


def kernels(name: str, x: Tensor, *channels: int) -> ModuleType | None:
    """Return this room's kernels `name` for x and so many channels, or None where plain torch has to do."""
    fits = x.is_cuda and x.element_size() == 4 and all(count % STEP == 0 for count in channels)
    return _module(name) if fits else None


@functools.cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"trilemma.models.kernels.{name}")
    except ImportError:
        return None


def tile(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`.

    >>> tile(96, 64), tile(128, 64)
    (32, 64)
    """
    return min(size & -size, most)
