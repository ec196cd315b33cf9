"""MLflow and Weights & Biases get every round's figures and what a run came to, where asked for."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from trilemma import config, report
from trilemma.base.errors import UserError
from trilemma.simulate import resume, run
from trilemma.simulate.trackers import said, track

SETTINGS = ["run.rounds=2", "run.evaluate_every=1", "run.seeds=[1,2]", "data.examples=200"]


class Pretended:
    """A run of W&B that remembers what it was told."""

    def __init__(self, **begun):
        self.begun, self.logged, self.saved, self.summary, self.finished = begun, [], [], {}, 0

    def log(self, numbers, step=None):
        self.logged.append((step, numbers))

    def save(self, path, base_path, policy):
        self.saved.append(Path(path).name)

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    made = []

    def init(**begun):
        made.append(Pretended(**begun))
        return made[-1]

    module = types.SimpleNamespace(init=init, Image=lambda path: Path(path).name)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_weights_and_biases_gets_figures_configuration_and_what_came_of_it(tmp_path, wandb):
    run(config.parse({}, [*SETTINGS, "run.log=['wandb']"]), tmp_path / "run")
    assert [one.begun["id"] for one in wandb] == [
        (tmp_path / "run" / "wandb" / f"seed-{seed}.run").read_text() for seed in (1, 2)
    ]
    assert wandb[0].begun["config"]["run.rounds"] == 2
    assert [step for step, _ in wandb[0].logged] == [1, 2]
    assert "test/accuracy" in wandb[0].logged[-1][1]
    result = report.load(tmp_path / "run")
    track(tmp_path / "run", result.config, result.summary, result.markdown(), [result.plot()])
    assert wandb[2].begun["id"] == wandb[0].begun["id"]
    assert "no guarantee" in wandb[2].summary
    assert {"config.toml", "summary.json", "table.md"} <= set(wandb[2].saved)
    assert ({"curves": "curves.png"}) in [numbers for _, numbers in wandb[2].logged]


def test_a_run_that_goes_on_goes_on_at_the_tracker_too(tmp_path, wandb):
    run(config.parse({}, [*SETTINGS, "run.log=['wandb']"]), tmp_path / "run")
    resume(tmp_path / "run")
    assert wandb[2].begun["id"] == wandb[0].begun["id"]
    assert wandb[2].begun["resume"] == "allow"


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_without_a_tracker_the_cure_is_told(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"pip install 'trilemma\[{name}\]'"):
        run(config.parse({}, [*SETTINGS, f"run.log=['{name}']"]), tmp_path / "run")


def test_what_is_said_is_never_an_epsilon_that_is_not_guaranteed(tmp_path):
    run(config.parse({}, SETTINGS), tmp_path / "run")
    found = said(report.load(tmp_path / "run").summary)
    assert "epsilon" not in found
    assert "no guarantee" in found


def test_mlflow_itself_gets_figures_configuration_and_what_came_of_it(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    pytest.importorskip("sqlalchemy", reason="MLflow's file needs SQLAlchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run(config.parse({}, [*SETTINGS, "run.log=['mlflow']"]), tmp_path / "run")
    result = report.load(tmp_path / "run")
    track(tmp_path / "run", result.config, result.summary, result.markdown(), [result.plot()])
    folder = tmp_path / "run" / "mlflow"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    found = client.get_run((folder / "seed-1.run").read_text())
    assert found.info.status == "FINISHED"
    assert found.data.params["run.rounds"] == "2"
    assert [one.step for one in client.get_metric_history(found.info.run_id, "test/accuracy")] == [1, 2]
    assert "no guarantee" in found.data.tags
    kept = {one.path for one in client.list_artifacts(found.info.run_id)}
    assert {"config.toml", "summary.json", "table.md", "curves.png"} <= kept
