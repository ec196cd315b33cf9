"""What an exported model takes: features, computed from examples as the run computed them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import trilemma as tl
from trilemma import config, data
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key
from trilemma.cli import app


def export(run: Path, target: Path):
    return CliRunner().invoke(app, ["export", str(run), str(target)])


@pytest.mark.parametrize(
    "holding", [{"project": 16, "norm": 1.5}, {"centre": True}, {"project": 8, "whiten": True}]
)
def test_a_model_on_features_says_how_to_compute_them(tmp_path: Path, holding) -> None:
    """Whoever has both files, and neither the run nor its configuration, gets the accuracy on record."""
    result = tl.run(data={"name": "phishing", **holding}, rounds=3, seeds=[4], out=tmp_path / "run")
    outcome = export(tmp_path / "run", tmp_path / "model.safetensors")
    assert outcome.exit_code == 0, outcome.exception
    assert "model.input.toml" in outcome.output.replace("\n", "")
    phishing = data.load("phishing", key=Key(1))
    given = tl.inputs(tmp_path / "model.input.toml")(phishing.x_test)
    assert torch.equal(given, result.inputs()(phishing.x_test))
    model = load_file(tmp_path / "model.safetensors")
    answers = given @ model["linear.weight"][0] + model["linear.bias"] > 0
    assert float((answers == phishing.y_test).double().mean()) == pytest.approx(result.summary.accuracy.mean)
    refused = export(tmp_path / "run", tmp_path / "model.pt")
    assert "model.input.toml is there already" in str(refused.exception)
    assert not (tmp_path / "model.pt").exists()


def test_a_model_on_examples_as_they_are_has_nothing_beside_it(tmp_path: Path) -> None:
    result = tl.run(rounds=1, out=tmp_path / "run")
    assert export(tmp_path / "run", tmp_path / "model.pt").exit_code == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.pt"]
    columns = {"one": torch.ones(2, 3)}
    assert result.inputs()(columns) is columns


def test_a_mean_of_ones_own_examples_wants_more_than_one() -> None:
    inputs = config.Inputs(config.parse({"data": {"centre": True}}), seed=1)
    with pytest.raises(UserError, match="one example is not enough"):
        inputs(torch.ones(1, 68))
    with pytest.raises(UserError, match="no example to compute features of"):
        inputs(torch.ones(0, 68))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("[data]\nproject = 3\n", "does not say what a model takes"),
        ("seed = 1\n[data]\nproject = 3\n[run]\nrounds = 3\n", "does not say what a model takes"),
        ("seed = 1\n[data]\nproject = 0\n", "project = 0"),
        ('seed = 1\nplugins = ["gone.py"]\n[data]\nproject = 3\n', "gone.py cannot be read"),
    ],
)
def test_a_file_that_does_not_say_what_a_model_takes_is_refused(tmp_path: Path, said: str, why: str) -> None:
    (tmp_path / "model.input.toml").write_text(said)
    with pytest.raises(ConfigError, match=why):
        tl.inputs(tmp_path / "model.input.toml")


DOUBLED = """
from trilemma import data

@data.feature_maps.register("doubled")
class Doubled(data.FeatureOptions):
    def build(self, shape):
        return lambda rows: 2 * rows
"""


def test_features_of_a_plugin_go_with_its_file(tmp_path: Path, plugins_forgotten: None) -> None:
    (tmp_path / "mine.py").write_text(DOUBLED)
    (tmp_path / "run.toml").write_text(
        'plugins = ["mine.py"]\n[data]\nfeatures = "doubled"\n[run]\nrounds = 1\n'
    )
    ran = CliRunner().invoke(app, ["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")])
    assert ran.exit_code == 0, ran.exception
    assert export(tmp_path / "run", tmp_path / "model.pt").exit_code == 0
    assert tl.inputs(tmp_path / "model.input.toml")(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


def test_a_model_on_features_that_nobody_else_has_is_not_exported(
    tmp_path: Path, plugins_forgotten: None
) -> None:
    exec(DOUBLED, {"__name__": "a_notebook"})
    tl.run(data={"name": "phishing", "features": "doubled"}, rounds=1, out=tmp_path / "run")
    outcome = export(tmp_path / "run", tmp_path / "model.pt")
    assert "does not say which file or package brings this feature map" in str(outcome.exception)
    assert not (tmp_path / "model.pt").exists()
