"""What tests of several papers' modules share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trilemma_lab.arena import arena


@pytest.fixture
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ground of the arena on which a run takes a moment."""
    short = replace(arena.GROUNDS["phishing-7"], changes=("run.rounds=2",))
    monkeypatch.setitem(arena.GROUNDS, "phishing-7", short)  # type: ignore[arg-type]
