"""Every configuration in configs/ is valid, and runs where its data are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trilemma import config, simulate

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_is_valid(path: Path) -> None:
    settings = config.load(path)
    assert config.parse(settings.dump()).dump() == settings.dump()


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    settings = config.load(path, ["run.device=cpu"])
    if settings.data.name not in ("phishing", "synthetic") and "TRILEMMA_DATA" not in os.environ:
        pytest.skip(f"{settings.data.name} needs TRILEMMA_DATA, a folder with its npz file")
    experiment = simulate.assemble(settings, seed=1)
    progress, record = simulate.step(experiment, simulate.start(experiment))
    assert progress.round == 1
    assert sum(record.weights) == pytest.approx(1, abs=1e-3)
