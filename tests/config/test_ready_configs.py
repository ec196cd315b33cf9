"""Every configuration that comes with the package is valid, and runs where its data are at hand."""

from __future__ import annotations

import os

import pytest

from trilemma import config, simulate


@pytest.mark.parametrize("name", config.ready)
def test_it_is_valid(name: str) -> None:
    settings = config.load(name)
    assert config.parse(settings.dump()).dump() == settings.dump()


@pytest.mark.slow
@pytest.mark.parametrize("name", config.ready)
def test_it_runs(name: str) -> None:
    settings = config.load(name, ["run.device=cpu"])
    if settings.data.name not in ("phishing", "synthetic") and "TRILEMMA_DATA" not in os.environ:
        pytest.skip(f"{settings.data.name} needs TRILEMMA_DATA, a folder with its npz file")
    experiment = simulate.assemble(settings, seed=1)
    progress, record = simulate.step(experiment, simulate.start(experiment))
    assert progress.round == 1
    assert sum(record.weights.values()) == pytest.approx(1, abs=1e-3)
