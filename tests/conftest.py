"""What all rooms share: one thread, how many examples a property is tried on, an orderly end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# `make check` tries a property on a few examples, always the same, `make test` on a hundred new ones, and
# `make chaos` those that are about what comes from outside on thousands.
settings.register_profile("quick", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("full", deadline=None)
settings.register_profile("nightly", deadline=None, max_examples=5000)
settings.load_profile("full")


def pytest_configure() -> None:
    """One thread per process; a run that is told to stop takes down what its tests started, as on Ctrl-C."""
    torch.set_num_threads(1)  # two test processes share two cores: more threads get in each other's way
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture
def plugins_forgotten() -> Iterator[None]:
    """Take out of the registries what a test's plugins entered."""
    from trilemma import plugins
    from trilemma.config import rooms

    before = {kind: set(one) for kind, one in rooms.rooms().items()}
    yield
    for kind, one in rooms.rooms().items():
        for name in set(one) - before[kind]:
            one.withdraw(name)
    plugins._loaded.clear()
    plugins.installed.cache_clear()
