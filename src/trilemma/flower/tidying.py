"""What is left of connections: collected after a few of them, and given back to the system.

What is left of a connection refers to itself, and has large buffers: Python, which counts objects and not
bytes, would let hundreds of megabytes of them lie, and the C library would keep what Python has freed.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

MOST = 64
"""Connections whose remains may lie until they are collected, however many come in a second."""


def _give_back() -> Callable[[int], object] | None:
    """Return what gives freed memory back to the system, where the C library has that."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None


class Tidying:
    """Counts the connections that have ended."""

    def __init__(self) -> None:
        self._ended = 0
        self._trim = _give_back()

    def ended(self) -> None:
        """Take note that a connection has ended."""
        self._ended += 1
        if self._ended % MOST == 0:
            gc.collect()

    def tidy(self) -> None:
        """Collect what is left, and give back what nobody uses."""
        if gc.collect() or self._ended:
            self._ended = 0
            if self._trim is not None:
                self._trim(0)
