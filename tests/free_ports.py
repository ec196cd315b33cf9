"""Ports that nobody has, for programs that must be told theirs before they start."""

from __future__ import annotations

import contextlib
import os
import socket
import time


def free_ports(count: int) -> int:
    """Return a port such that it, and the `count` after it, are free on loopback."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4
    # Below those that the system gives to whoever connects, each worker its own.
    first = 20000 + 3000 * worker
    for base in range(first + (time.monotonic_ns() // 1000) % 2000, first + 3000 - count, count + 1):
        with contextlib.ExitStack() as held:
            try:
                for port in range(base, base + count + 1):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return base
    raise RuntimeError("no free ports")
