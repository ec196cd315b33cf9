"""What all rooms share: one thread, how many examples a property is tried on, what is slow, a clean end."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
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

# Several files of this name are one too many for who looks for examples in docstrings.
collect_ignore_glob = ["**/conftest.py"]


def pytest_configure() -> None:
    """Let a run that is told to stop take down what its tests started, as on Ctrl-C.

    Disks are not waited for: no test pulls the plug, and those that ask whether a file was synced see it.
    """
    os.fsync = lambda descriptor: None
    if threading.current_thread() is threading.main_thread():
        for one in (signal.SIGTERM, signal.SIGINT):  # `nohup make test` would ignore the second
            signal.signal(one, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """One thread per process: two test processes share two cores, and more would get in each other's way.

    And the garbage collector passes over what stays: thousands of tests, and all that they import.
    """
    import torch  # not where a process hands out tests to others

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


# --- which tests are slow -----------------------------------------------------------------------------------

# Which tests are slow is measured, not guessed: `make slow-list` writes down those that took longer than this
# (seconds), and they are marked `slow` beside those whose authors marked them.
SLOW = 0.25
SLOW_LIST = Path(__file__).parent / "tests" / "slow.txt"
_took: dict[str, list[float]] = defaultdict(list)


def function_of(nodeid: str) -> str:
    """Return a test without its parameters."""
    return nodeid.split("[")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a whole run write the list of slow tests."""
    parser.addoption("--write-slow-list", action="store_true", help=f"write {SLOW_LIST.name} from this run")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow ones, before pytest leaves out what is not asked for."""
    slow = set(SLOW_LIST.read_text(encoding="utf-8").splitlines())
    for item in items:
        if function_of(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember how long a test took."""
    if report.when == "call":
        _took[function_of(report.nodeid)].append(report.duration)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the list, sorted, in the process that hears of all tests."""
    if session.config.getoption("--write-slow-list") and not hasattr(session.config, "workerinput"):
        slow = sorted(name for name, took in _took.items() if sum(took) > SLOW * len(took))
        SLOW_LIST.write_text("".join(f"{name}\n" for name in slow), encoding="utf-8")


@pytest.fixture
def refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is held here stays held: do not wait for it."""
    monkeypatch.setattr("trilemma.base.files.PATIENCE", 0.0)


@pytest.fixture
def locks_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of a process that was killed goes free, however long a busy machine takes to end it."""
    monkeypatch.setattr("trilemma.base.files.PATIENCE", 240.0)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of sweeps are run in this very process, which saves the start of others."""
    from trilemma.simulate.sweep import grid
    from trilemma.simulate.sweep.work import work

    def run(jobs, at_once, watcher) -> None:
        for job in jobs:
            watcher.started(job, 0)
            watcher.ended(job, work(job, lambda rounds: None))

    monkeypatch.setattr(grid, "run_jobs", run)


@pytest.fixture
def plugins_forgotten() -> Iterator[None]:
    """Take out of the registries what a test's plugins entered."""
    from trilemma.base import plugins
    from trilemma.experiment import rooms

    before = {kind: set(one) for kind, one in rooms.rooms().items()}
    yield
    for kind, one in rooms.rooms().items():
        for name in set(one) - before[kind]:
            one.withdraw(name)
    plugins._loaded.clear()
    plugins.installed.cache_clear()


@pytest.fixture
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ground of the arena on which a run takes a moment."""
    from trilemma_lab.arena import arena

    short = replace(arena.GROUNDS["phishing-7"], changes=("run.rounds=2",))
    monkeypatch.setitem(arena.GROUNDS, "phishing-7", short)
