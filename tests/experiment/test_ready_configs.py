"""Every configuration that comes with the package is valid, and runs where its data are at hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from trilemma import config, simulate


@pytest.mark.parametrize("name", config.ready)
def test_it_is_valid(name: str) -> None:
    settings = config.load(name)
    assert config.parse(settings.dump()).dump() == settings.dump()


LONG = (
    "few-coordinates-cifar",
    "few-coordinates-mnist-subspace",
    "frontier-mnist",
    "frontier-mnist-drawn",
    "frontier-mnist-whitened",
)
"""A round of these takes fifteen seconds: at night. Others do the same with smaller images and models."""


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the first examples of an image set to a folder, once.

    Features of all of them take a minute; 30 for each of 100 clients are enough for a smaller batch.
    """
    folder = tmp_path_factory.mktemp("few")

    @cache
    def shortened(name: str) -> Path:
        for path in Path(os.environ["TRILEMMA_DATA"]).glob(f"{name.replace('-', '_')}*.npz"):
            with np.load(path) as whole:
                parts = {part: whole[part][: 3000 if part.endswith("train") else 100] for part in whole.files}
            np.savez(folder / path.name, **parts)
        return folder

    return shortened


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly) if name in LONG else name for name in config.ready],
)
def test_it_runs(
    name: str, few: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config.load(name, ["run.device=cpu"])
    if settings.data.name not in ("phishing", "synthetic") and "TRILEMMA_DATA" not in os.environ:
        pytest.skip(f"{settings.data.name} needs TRILEMMA_DATA, a folder with its npz file")
    if settings.features.name != "none":
        settings = settings.with_("algorithm.batch_size=25")
        monkeypatch.setenv("TRILEMMA_DATA", str(few(settings.data.name)))
        monkeypatch.setenv("TRILEMMA_CACHE", str(tmp_path / "cache"))
    experiment = simulate.assemble(settings, seed=1)
    progress, record = simulate.step(experiment, simulate.start(experiment))
    assert progress.round == 1
    assert sum(record.weights.values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", config.ready)
def test_who_ends_at_chance_says_so_on_top(name: str) -> None:
    """Noise certified for user-level ε = 13 and 25 clients: nobody learns MNIST, which is what it shows."""
    said = config.load(name)
    hidden = (said.privacy.threat, said.privacy.epsilon, said.federation.clients) == ("ldp", 13.0, 25)
    if hidden and said.data.name == "mnist" and said.privacy.noise != "paper":
        assert "ends at chance" in config.ready[name].text.replace("\n# ", " ")
