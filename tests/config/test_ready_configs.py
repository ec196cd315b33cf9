"""Every configuration that comes with the package is valid, and runs where its data are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from trilemma import config, simulate


@pytest.mark.parametrize("name", config.ready)
def test_it_is_valid(name: str) -> None:
    settings = config.load(name)
    assert config.parse(settings.dump()).dump() == settings.dump()


def shorten(folder: Path) -> None:
    """Write the first examples of the image sets to a folder: features of all of them take a minute."""
    for source in ("mnist", "fashion_mnist", "cifar10", "cifar10_20k"):
        path = Path(os.environ["TRILEMMA_DATA"]) / f"{source}.npz"
        if path.exists():
            with np.load(path) as whole:
                few = {part: whole[part][: 10000 if part.endswith("train") else 100] for part in whole.files}
            np.savez(folder / path.name, **few)


@pytest.mark.slow
@pytest.mark.parametrize("name", config.ready)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.load(name, ["run.device=cpu"])
    if settings.data.name not in ("phishing", "synthetic") and "TRILEMMA_DATA" not in os.environ:
        pytest.skip(f"{settings.data.name} needs TRILEMMA_DATA, a folder with its npz file")
    if settings.features.name != "none":
        shorten(tmp_path)
        monkeypatch.setenv("TRILEMMA_DATA", str(tmp_path))
        monkeypatch.setenv("TRILEMMA_CACHE", str(tmp_path / "cache"))
    experiment = simulate.assemble(settings, seed=1)
    progress, record = simulate.step(experiment, simulate.start(experiment))
    assert progress.round == 1
    assert sum(record.weights.values()) == pytest.approx(1, abs=1e-3)
