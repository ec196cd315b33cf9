"""An own model with own data: stated in Python or in a file, simulated, refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trilemma as tl
from trilemma import config, simulate
from trilemma.base.errors import ConfigError, UserError
from trilemma.cli import app
from trilemma.simulate import engine


def examples(client: int, rows: int = 30) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(client)
    x = rng.normal(size=(rows, 4))
    return x, (x.sum(1) > 0).astype(int)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def classifier(clients: int = 5, **more) -> tl.Task:
    return tl.Task(model=net, clients=[examples(i) for i in range(clients)], test=examples(99, 200), **more)


DSGD = {"name": "dsgd", "lr": 0.3, "batch_size": 10}


def test_a_run_is_the_textbook_loop(tmp_path):
    """One client, plain SGD: the same numbers as torch's own optimiser on the same batches."""
    task = classifier(clients=1)
    settings = config.parse(
        {"algorithm": {**DSGD, "momentum": 0.0}, "run": {"rounds": 6}}, own=config.Own(task.clients_known)
    )
    experiment = simulate.assemble(settings, 1, task)
    model = experiment.clients.model
    progress = engine.start(experiment)
    module = net()
    module.load_state_dict(tl.models.state_dict(model, progress.broadcast["params"]))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.3)
    for round_ in range(6):
        key = experiment.key.fold("round", round_, "batch")
        batch = experiment.clients.sample(10, key)
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(batch.x[0]), batch.y[0]).backward()
        optimiser.step()
        progress, _ = engine.step(experiment, progress)
    trained = tl.models.state_dict(model, progress.broadcast["params"])
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_trained_module_comes_back(tmp_path):
    task = classifier()
    result = tl.run(
        task, byzantine=1, attack="sf", rule="caf", algorithm=DSGD, rounds=40, seeds=2, out=tmp_path / "run"
    )
    module = net()
    module.load_state_dict(result.state_dict(seed=2))
    x, y = examples(99, 200)
    said = module(torch.tensor(x, dtype=torch.float32)).argmax(1).numpy()
    assert result.summary.accuracy.per_seed["2"] == pytest.approx((said == y).mean(), abs=1e-6)
    assert result.summary.accuracy.mean > 0.85
    assert result.suspects(seed=2)[0].client == 4, "the last one lies"
    assert [*tl.load(tmp_path / "run").state_dict()] == [*module.state_dict()]


def test_a_run_of_a_task_made_in_python_continues_with_the_task_given_again(tmp_path):
    class Stop:
        def seed_started(self, seed, first_round, rounds):
            self.first = first_round

        def round_finished(self, record):
            if record.round == 3 and not self.first:
                raise KeyboardInterrupt

    out, asked = tmp_path / "run", {"algorithm": DSGD, "rounds": 5}
    with pytest.raises(KeyboardInterrupt):
        tl.run(classifier(), **asked, out=out, observer=Stop())
    with pytest.raises(UserError, match=r"made in Python .* resume=True"):
        simulate.resume(out)
    with pytest.raises(UserError, match="another configuration"):
        tl.run(classifier(), **asked | {"rounds": 6}, out=out, resume=True)
    with pytest.raises(ConfigError, match="name it with out"):
        tl.run(classifier(), **asked, resume=True)
    continued = tl.run(classifier(), **asked, out=out, resume=True)
    whole = tl.run(classifier(), **asked, out=tmp_path / "whole", resume=True)
    assert torch.equal(continued.params(), whole.params())


def test_a_regression_is_never_called_accurate(tmp_path):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=3)
    clients = [(x, x @ weights) for x in (rng.normal(size=(30, 3)) for _ in range(3))]
    task = tl.Task(model=lambda: nn.Linear(3, 1), clients=clients, test=clients[0])
    result = tl.run(task, algorithm={**DSGD, "lr": 0.1}, rounds=60, out=tmp_path / "run")
    assert [*result.summary.metrics] == ["mse"]
    assert result.summary.metrics["mse"].mean == pytest.approx(result.summary.loss.mean, abs=1e-6)
    assert result.summary.metrics["mse"].mean < 0.05
    assert "mse" in str(result.table())
    assert "accuracy" not in str(result.table())
    assert "accuracy" not in (tmp_path / "run" / "summary.json").read_text()
    with pytest.raises(AttributeError, match="mse"):
        _ = result.summary.accuracy
    assert result.plot().is_file()


def test_several_labels_are_learned_by_binary_cross_entropy(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    y = (x[:, :3] > 0).astype(int)
    task = tl.Task(model=lambda: nn.Linear(4, 3), clients=[(x, y)] * 3, test=(x, y))
    assert isinstance(task.learner(task.dataset).model.engine.source.given, nn.BCEWithLogitsLoss)
    result = tl.run(task, algorithm={**DSGD, "lr": 1.0}, rounds=30, out=tmp_path / "run")
    assert result.summary.score == "accuracy"
    assert result.summary.metrics["accuracy"].mean > 0.9


def test_clients_with_tests_of_their_own(tmp_path):
    task = tl.Task(
        model=net,
        clients={"north": examples(0), "south": examples(1)},
        test={"north": examples(2, 10), "south": examples(3, 30)},
        metrics=["auc", "accuracy"],
    )
    result = tl.run(task, algorithm=DSGD, rounds=5, out=tmp_path / "run")
    module = net()
    module.load_state_dict(result.state_dict())
    right = [
        float((module(torch.tensor(x, dtype=torch.float32)).argmax(1).numpy() == y).sum())
        for x, y in (examples(2, 10), examples(3, 30))
    ]
    assert result.summary.score == "auc"
    assert result.summary.accuracy.mean == pytest.approx(sum(right) / 40, abs=1e-6)
    assert "worst_tenth" in result.records[-1].metrics


def coupled(outputs, y):
    return (outputs - outputs.mean()).square().mean() + 0.0 * y.sum()


def test_a_loss_of_whole_batches_is_found(tmp_path):
    task = classifier(loss=coupled, metrics={"spread": lambda outputs, y: float(outputs.var())})
    per_client = {"threat": "ldp", "clip": 1.0, "sigma_ind": 0.01}
    result = tl.run(task, algorithm=DSGD, privacy=per_client, rounds=3, out=tmp_path / "run")
    assert result.summary.loss.mean is not None
    with pytest.raises(UserError, match="couples the examples"):
        tl.run(
            task,
            algorithm={**DSGD, "unit": "example"},
            privacy=per_client,
            rounds=3,
            out=tmp_path / "refused",
        )
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"bizantine": 2}, "unknown argument 'bizantine': did you mean 'byzantine'"),
        ({"rule": "cafe"}, "did you mean 'caf'"),
        ({"lr": 0.3}, "an option of the algorithm"),
        ({"algorithm": "dsgdd"}, "unknown algorithm 'dsgdd': did you mean 'dsgd'"),
        ({"algorithm": {"name": "dsgd", "rate": 1}}, "algorithm: unknown key 'rate'"),
        ({"clients": 7}, "the task has 5"),
        ({"data": "mnist"}, "the task brings its own data"),
        ({"model": "cnn"}, "the task brings its own model"),
        ({"partition": "dirichlet"}, "the task says what each client holds"),
        ({"holders": "honest"}, "the task says what each client holds"),
        ({"attack": "lff"}, "unknown attack 'lff'"),
        ({"algorithm": {"name": "dsgd", "batch_size": 31}}, "the poorest client holds 30"),
    ],
)
def test_arguments_are_refused_as_a_configuration_is(tmp_path, arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        tl.run(classifier(), out=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"clients": []}, "there are no clients"),
        ({"clients": [examples(0), (np.full((3, 4), np.nan), [0, 1, 0])]}, "client 1, row 0, column 0: nan"),
        ({"classes": 1}, r"client 0, row \d+: label 1; allowed: 0 to 0"),
        ({"model": 3}, "model is a int"),
        ({"loss": nn.CrossEntropyLoss}, r"give an instance, CrossEntropyLoss\(\)"),
        ({"metrics": ["acuracy"]}, "did you mean 'accuracy'"),
        ({"metrics": {"rounds": "accuracy"}}, "cannot be called 'rounds'"),
        ({"clients": "data.csv"}, "clients is a str"),
    ],
)
def test_what_is_wrong_with_a_task_is_said_where_it_is_stated(change, complaint):
    with pytest.raises(UserError, match=complaint):
        tl.Task(**{"model": net, "clients": [examples(0)], **change})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"loss": lambda outputs, y: 5}, "the loss returned a int; it must be a tensor computed from"),
        (
            {"loss": lambda outputs, y: torch.tensor(1.0)},
            "the loss returned a tensor that no output was used",
        ),
        ({"metrics": {"mine": lambda outputs, y: 1 / 0}}, "metric 'mine' failed: ZeroDivisionError"),
    ],
)
def test_what_a_loss_or_a_metric_does_wrong_is_said(tmp_path, change, complaint):
    task = tl.Task(**{"model": net, "clients": [examples(0), examples(1)], "test": examples(2), **change})
    with pytest.raises(UserError, match=complaint):
        tl.run(task, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_no_task_is_refused():
    with pytest.raises(ConfigError, match=r"task is a Linear; allowed: a Task, or the path of a task\.py"):
        tl.run(nn.Linear(2, 2))


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
def test_classes_that_no_output_is_for_are_refused_where_the_first_examples_do_not_show_them(tmp_path, loss):
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    sorted_by_label = x, (torch.arange(200) >= 150).long()
    task = tl.Task(model=lambda: nn.Linear(4, 1), clients=[sorted_by_label] * 2, loss=loss)
    with pytest.raises(UserError, match=r"Linear has outputs \(128, 1\) for 2 classes"):
        tl.run(task, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


TASK = """
import numpy as np
from torch import nn
from shapes import WIDTH

clients = 3
prepared = []

def prepare():
    prepared.append(1)

def model():
    return nn.Linear(WIDTH, 2)

def data(client):
    assert prepared == [1]
    rng = np.random.default_rng(client)
    x = rng.normal(size=(20, WIDTH))
    return x, (x.sum(1) > 0).astype(int)

def test():
    return data(7)
"""


@pytest.fixture
def task_file(tmp_path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "shapes.py").write_text("WIDTH = 4\n")
    path = tmp_path / "code" / "task.py"
    path.write_text(TASK)
    return path


RUN = ["--set", "run.rounds=4", "--set", "algorithm.batch_size=10"]


def test_a_run_of_a_file_continues_where_it_stopped(tmp_path, task_file):
    out = tmp_path / "run"
    outcome = CliRunner().invoke(app, ["run", "--task", str(task_file), "--out", str(out), "--json", *RUN])
    assert outcome.exit_code == 0, outcome.exception
    summary = json.loads(outcome.stdout)
    assert (summary["clients"], summary["rounds"]) == (3, 4)
    assert (out / "task" / "shapes.py").is_file()
    model = (out / "seed-1" / "model.npy").read_bytes()
    (out / "seed-1" / "model.npy").unlink()
    task_file.rename(tmp_path / "elsewhere.py")  # then the copy does
    again = CliRunner().invoke(app, ["run", "--resume", str(out), "--json"])
    assert again.exit_code == 0, again.exception
    assert (out / "seed-1" / "model.npy").read_bytes() == model


def test_a_changed_task_is_not_continued(tmp_path, task_file):
    out = tmp_path / "run"
    CliRunner().invoke(app, ["run", "--task", str(task_file), "--out", str(out), "--json", *RUN])
    (task_file.parent / "shapes.py").write_text("WIDTH = 5\n")
    outcome = CliRunner().invoke(app, ["run", "--resume", str(out)])
    assert isinstance(outcome.exception, UserError)
    assert "was changed since this run began" in str(outcome.exception)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("clients = 3", ""), "needs clients"),
        (("def data(", "def dta("), "must define a function `data`; did you mean 'dta'"),
        (("rng.normal(", "rng.nrmal("), r"data\(0\) failed in task.py, line \d+: AttributeError"),
        (("return nn.Linear(WIDTH, 2)", "return WIDTH"), "returned a int"),
        (("import numpy as np", "import numpyy"), "cannot be imported"),
        (
            ("import numpy as np", "raise SystemExit(3)"),
            r"cannot be imported in task.py, line \d+: SystemExit: 3",
        ),
        (("rng = np", "exit(4); rng = np"), r"data\(0\) failed in task.py, line \d+: SystemExit: 4"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, task_file, change, complaint):
    task_file.write_text(TASK.replace(*change))
    outcome = CliRunner().invoke(app, ["run", "--task", str(task_file), "--out", str(tmp_path / "run"), *RUN])
    assert isinstance(outcome.exception, UserError)
    with pytest.raises(UserError, match=complaint):
        raise outcome.exception
    assert not (tmp_path / "run").exists()


def test_a_configuration_of_a_task_says_that_it_needs_one(tmp_path, task_file):
    out = tmp_path / "run"
    CliRunner().invoke(app, ["run", "--task", str(task_file), "--out", str(out), *RUN])
    with pytest.raises(ConfigError, match="give it with --task"):
        simulate.assemble(config.load(out / "config.toml"), 1)


@pytest.mark.parametrize("train", ["head", {"subspace": 10}, {"lora": 1}])
def test_the_whole_module_comes_back_where_little_is_trained(tmp_path, train):
    task = classifier(clients=3)
    result = tl.run(task, model={"train": train}, algorithm=DSGD, rounds=3, seeds=2, out=tmp_path / "run")
    module = net()
    module.load_state_dict(result.state_dict(seed=2))
    x, y = examples(99, 200)
    said = module(torch.tensor(x, dtype=torch.float32)).argmax(1).numpy()
    assert result.summary.accuracy.per_seed["2"] == pytest.approx((said == y).mean(), abs=1e-6)


def test_a_catalogue_model_of_which_little_was_trained_comes_back(tmp_path):
    result = tl.run(model={"name": "mlp", "hidden": [4], "train": "head"}, rounds=2, out=tmp_path / "run")
    whole = tl.models.build("mlp", (68,), 2, hidden=(4,))
    assert {name: tuple(part.shape) for name, part in result.state_dict().items()} == dict(whole.shapes)


def test_a_configuration_given_as_a_task_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\n", "utf-8")
    with pytest.raises(UserError, match=r"run\.toml is no task: allowed is a Python file"):
        tl.Task.from_file(tmp_path / "run.toml")
