"""A bell between two processes of a party: who has something for the other rings, who waits need not ask.

Asking is dear: one question of a client for work costs the SuperLink 9 ms of a core, the SuperNode 5 ms, and
20 clients that ask five times a second take all of a machine with two cores. So the guard keeps a client's
question until the server's worker has sent something (it rings at the server), and a client's worker asks its
SuperNode when that has received something (it rings at the client). Who misses a ring asks a little later all
the same.

A bell is a file that grows by a byte with each ring. That is all two processes need to have in common, it
survives either of them, and looking at it takes microseconds.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from trilemma.flower import BELL

LOOK = 0.05
"""Seconds between two looks at a bell."""

LARGEST = 1 << 20
"""Bytes at which a bell begins anew."""


class Bell:
    """The bell at `path`; without one nothing is heard.

    >>> import tempfile
    >>> bell = Bell(Path(tempfile.mkdtemp()) / "bell")
    >>> before = bell.heard
    >>> bell.ring(); bell.heard == before
    False
    >>> bell.wait(before, limit=60.0), bell.wait(bell.heard, limit=0.0)
    (True, False)
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def of_this_party(cls) -> Bell:
        """Return the bell that the environment names."""
        path = os.environ.get(BELL)
        return cls(None if path is None else Path(path))

    @property
    def heard(self) -> int:
        """What tells one ring from the one before."""
        with contextlib.suppress(OSError):
            return 0 if self.path is None else self.path.stat().st_size
        return 0

    def ring(self) -> None:
        """Let the other one know; where that cannot be written down it finds out by itself."""
        if self.path is not None:
            with contextlib.suppress(OSError), self.path.open("ab" if self.heard < LARGEST else "wb") as file:
                file.write(b".")

    def wait(self, heard: int, limit: float) -> bool:
        """Wait until it has rung since `heard`; tell whether it did within `limit` seconds."""
        deadline = time.monotonic() + limit
        while self.heard == heard:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(LOOK, left))
        return True
