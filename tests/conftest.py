"""What all rooms share: one thread, how many examples a property is tried on, an orderly end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# `make check` tries a property on a few examples and `make test` on a hundred, always the same: whether a
# change is taken must not depend on luck. `make chaos` tries those that are about what comes from outside on
# thousands of new ones.
# Nothing is judged by the time it takes, which says more about the machine.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", patient, max_examples=10, derandomize=True)
settings.register_profile("full", patient, derandomize=True)
settings.register_profile("nightly", patient, max_examples=5000)
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
