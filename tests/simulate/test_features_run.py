"""A run on features: few numbers are learned, and what was computed is used again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from trilemma import config
from trilemma.base.errors import ConfigError
from trilemma.cli import app
from trilemma.simulate.experiment import assemble

FOLDER = os.environ.get("TRILEMMA_DATA")


def test_features_are_said_as_a_name_or_as_a_table() -> None:
    for said in ("data.features=scattering", 'data.features={name = "scattering", J = 2}'):
        read = config.parse({}, [said, "data.project=128"])
        assert read.features.name == "scattering"
        assert read.holding.project == 128
        assert config.parse(read.dump()) == read
    for said, message in (
        ("data.features=scatering", r"\[data.features\] unknown feature map 'scatering': did you mean"),
        ("data.features.K=3", r"\[data.features\] unknown key 'K'"),
        ("data.project=0", r"\[data\] project = 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.parse({}, [said])


def test_a_projection_is_drawn_from_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRILEMMA_CACHE", str(tmp_path))
    read = config.parse({}, ["data.project=10", "data.norm=1.0"])
    one, again, other = (assemble(read, seed).clients.data.dataset.x_train for seed in (1, 1, 2))
    assert one.shape == (8400, 10)
    assert float(one.norm(dim=1).max()) <= 1 + 1e-6
    assert bool((one == again).all())
    assert not bool((one == other).all())


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="TRILEMMA_DATA names no folder with the image sets")
def test_a_run_on_scattering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first 500 digits; the whole set takes half a minute of scattering."""
    with np.load(Path(str(FOLDER)) / "mnist.npz") as whole:
        few = {name: whole[name][: 500 if name.endswith("train") else 100] for name in whole.files}
    np.savez(tmp_path / "mnist.npz", **few)
    monkeypatch.setenv("TRILEMMA_DATA", str(tmp_path))
    monkeypatch.setenv("TRILEMMA_CACHE", str(tmp_path / "cache"))
    told = [
        "data.name=mnist",
        "data.features=scattering",
        "data.project=128",
        "model.name=multinomial",
        "algorithm.batch_size=50",
        "algorithm.lr=0.01",
        "run.rounds=10",
    ]
    settings = [part for one in told for part in ("--set", one)]
    result = CliRunner().invoke(app, ["run", *settings, "--json", "--out", str(tmp_path / "runs")])
    assert result.exit_code == 0, result.output
    experiment = assemble(config.parse({}, told), 1)
    assert experiment.clients.model.dim == 1290
    description = experiment.clients.data.dataset.description
    assert "features scattering (J = 2, L = 8), projected to 128" in description
    assert len([*(tmp_path / "cache" / "features").iterdir()]) == 2
