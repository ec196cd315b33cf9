"""What tests of studies share: runs in this very process, which save the start of another."""

from __future__ import annotations

import pytest

from trilemma.simulate.sweep import grid as on_disk
from trilemma.simulate.sweep.work import work


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(jobs, at_once, watcher) -> None:
        for job in jobs:
            watcher.started(job, 0)
            watcher.ended(job, work(job, lambda rounds: None))

    monkeypatch.setattr(on_disk, "ENGINES", {"local": run})
