"""What all rooms share: one thread, how many examples a property is tried on, an orderly end."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from hypothesis import settings

# `make check` tries a property on a few examples, always the same, `make test` on a hundred new ones.
settings.register_profile("quick", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("full", deadline=None)
settings.load_profile("full")


def pytest_configure() -> None:
    """Let a run that is told to stop take down what its tests started, as it does on Ctrl-C."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two test processes share two cores; more threads only get in each other's way."""
    torch.set_num_threads(1)
