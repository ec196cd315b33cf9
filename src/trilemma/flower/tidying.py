"""What is left of connections: collected after a few of them, and given back to the system.

What is left of a connection refers to itself, and has large buffers: Python, which counts objects and not
bytes, would let hundreds of megabytes of them lie, and the C library would keep what Python has freed.
"""

from __future__ import annotations

import ctypes
import gc

MOST = 64
"""Connections whose remains may lie until they are collected, however many come in a second."""


class Tidying:
    """Counts the connections that have ended."""

    def __init__(self) -> None:
        self._ended = 0
        try:
            self._trim = ctypes.CDLL(None).malloc_trim
        except (OSError, TypeError, AttributeError):  # another C library, or another system
            self._trim = None

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
