"""Flower's waiting times, where it has no option for them.

Flower 1.41 sleeps 3 s between two looks for a message (SuperNode), 0.5 s between two looks for its app's
reply, and 1 s, then 2 s, … when it asks for an object a moment before it was uploaded. On a fast network with
a small model a round consists of little else. The constants are not settable, so they are set here, in the
processes this package starts and nowhere else; docs/federation.md has the measurements.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

from flwr.supercore.inflatable import inflatable_utils

POLL = "TRILEMMA_POLL"
"""Environment variable: seconds between two looks."""


def poll_seconds() -> float:
    """Return the bound on a wait, in seconds.

    >>> os.environ.pop(POLL, None) and None
    >>> poll_seconds()
    0.2
    """
    return float(os.environ.get(POLL, "0.2"))


def bounded_clock(bound: float) -> SimpleNamespace:
    """Return a stand-in for the `time` module whose sleeps last at most `bound` seconds.

    >>> clock = bounded_clock(0.001)
    >>> start = clock.monotonic(); clock.sleep(3); clock.monotonic() - start < 1
    True
    """
    names = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    return SimpleNamespace(**{**names, "sleep": lambda seconds: time.sleep(min(seconds, bound))})


def retry_sooner() -> None:
    """Ask again for an object that is not there yet after a fraction of a poll, not after a second."""
    for pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        pull.__kwdefaults__["initial_backoff"] = poll_seconds() / 4
