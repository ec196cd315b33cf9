"""`trilemma check` and `trilemma export`: what is said of a task, what is refused, the model as a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import trilemma as tl
from trilemma import models
from trilemma.base.errors import ConfigError, UserError
from trilemma.cli import app
from trilemma.task.inspection import inspect

TASK = """
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.body.weight.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

def model():
    return Net()

def data(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=(20 + client, 4))
    return x, np.arange(20 + client) % 3

def test():
    return data(9)
"""
RUN = """
[federation]
clients = 3
[algorithm]
name = "dsgd"
unit = "example"
batch_size = 8
[privacy]
threat = "ldp"
clip = 1.0
noise_multiplier = 4.0
[run]
rounds = 3
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_task_is_described(files):
    outcome = call("check", files / "task.py", "--clients", "2", "--device", "cpu")
    assert outcome.exit_code == 0, outcome.exception
    for said in (
        "features: 4 float32, all finite",
        "client 1: 21 examples, labels 0: 7, 1: 7, 2: 7",
        "Net: 27 parameters are trained and travel",
        "24 numbers are not trained",
        "head.weight: linear",
        "compared with autograd",
        "2 clients × 20 examples, clipped per example",
        "nothing is wrong",
    ):
        assert said in outcome.output


def test_a_task_is_described_as_it_would_run(files):
    outcome = call("check", files / "task.py", "--config", files / "run.toml", "--device", "cpu")
    assert outcome.exit_code == 0, outcome.exception
    assert "3 clients × 8 examples" in outcome.output
    assert "example level: clipped at 1, ε = " in outcome.output


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("x = rng.normal", "x = np.inf * rng.normal"), "client 0, row 0, column 0: -?inf"),
        (
            ("torch.relu(self.body(x))", "torch.relu(x.repeat(1, 2)[:, :6])"),
            "body.bias of Net is trained but",
        ),
        (
            ("nn.Linear(6, 3)", "nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))"),
            "Use nn.GroupNorm instead",
        ),
        (("% 3", "% 3 / 2"), "each target needs one output"),
        (("nn.Linear(4, 6)", "nn.Linear(5, 6)"), r"Net cannot be called on examples \(60, 4\)|\(63, 4\)"),
        (
            ("nn.Linear(6, 3)", "nn.Linear(6, 2)"),
            r"outputs \(\d+, 2\) for 3 classes .client 0, row 2: label 2.: cross entropy",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_cure(files, change, complaint):
    (files / "task.py").write_text(TASK.replace(*change))
    outcome = call("check", files / "task.py", "--config", files / "run.toml", "--device", "cpu")
    assert isinstance(outcome.exception, UserError), outcome.output
    with pytest.raises(UserError, match=complaint):
        raise outcome.exception


def test_columns_far_from_unit_size_are_named(files):
    raw = "x = rng.normal(size=(20 + client, 4)) * np.array([1, 30, 4254, 1])"
    (files / "task.py").write_text(TASK.replace("x = rng.normal(size=(20 + client, 4))", raw))
    outcome = call("check", files / "task.py", "--clients", "2", "--device", "cpu")
    assert outcome.exit_code == 0, outcome.exception
    assert "warning: column 2 reaches" in outcome.output
    assert "(2 columns reach more than 20)" in outcome.output
    assert "by a public constant" in outcome.output
    assert "nothing is wrong" not in outcome.output


def test_names_that_are_not_declared_are_pointed_out(tmp_path):
    for client in range(2):
        rows = "".join(f"{row},{row % 5},{row % 2}\n" for row in range(12))
        (tmp_path / f"{client}.csv").write_text("age,pulse,label\n" + rows)
    text = """
from pathlib import Path
import trilemma as tl
from torch import nn
clients = 2
def model(): return nn.Linear(2, 2)
def data(client): return Path(__file__).parent / f"{client}.csv"
"""
    (tmp_path / "task.py").write_text(text)
    said = call("check", tmp_path / "task.py").output
    assert "names=('age', 'pulse')" in said.split("a record")[1]
    expects = 'expects = tl.Declaration(tl.Values("numbers", (2,), 0, 5), tl.Values("whole", high=1))'
    (tmp_path / "task.py").write_text(text + expects)
    outcome = call("check", tmp_path / "task.py")
    assert "warning: these tables name their columns and `expects` does not" in outcome.output
    assert "client 0: 12 examples, 6 not as `expects` says, labels 0: 3, 1: 3" in outcome.output


def test_without_a_number_of_clients_nothing_can_be_looked_at(files):
    assert "how many clients are there?" in str(call("check", files / "task.py").exception)


class Mixing(nn.Module):
    """Outputs that look at the whole batch, in a way no test of shapes can see."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x - x.mean(0))


def test_a_private_run_is_not_begun_with_wrong_gradients(tmp_path):
    x, y = np.random.default_rng(1).normal(size=(20, 4)), np.arange(20) % 2
    task = tl.Task(model=Mixing, clients=[(x, y)] * 3, coupled=False)
    privacy = tl.Privacy(threat="ldp", clip=1.0, noise_multiplier=4.0)
    algorithm = {"name": "dsgd", "unit": "example", "batch_size": 8}
    with pytest.raises(UserError, match=r"couples|plain loop over examples"):
        tl.run(task, algorithm=algorithm, privacy=privacy, rounds=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_batch_normalisation_wants_an_algorithm_that_keeps_its_statistics(tmp_path):
    x, y = np.random.default_rng(1).normal(size=(40, 4)) + 3, np.arange(40) % 2

    def net():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    task = tl.Task(model=net, clients=[(x, y)] * 3, test=(x, y))
    with pytest.raises(ConfigError, match="keeps no running statistics"):
        tl.run(task, rounds=2, out=tmp_path / "refused")
    result = tl.run(task, algorithm={"name": "fedavg", "batch_size": 10}, rounds=3, out=tmp_path / "run")
    module = net()
    module.load_state_dict(result.state_dict())
    assert float(module[1].running_mean.abs().max()) > 0, "the clients' statistics came along"
    looked = inspect(task)
    assert looked.problems == ()
    assert "a mean over examples, which batch normalisation couples" in looked.facts["loss"]
    assert any("keeps them (fedavg)" in line for line in looked.facts["gradients"])


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_the_model_is_exported(files, name):
    run = files / "run"
    began = call("run", files / "run.toml", "--task", files / "task.py", "--out", run)
    assert began.exit_code == 0, began.exception
    assert "27 parameters are trained and travel" in began.stderr
    outcome = call("export", run, files / name)
    assert outcome.exit_code == 0, outcome.exception
    read = load_file(files / name) if name.endswith("safetensors") else torch.load(files / name)
    assert set(read) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    state = tl.load(run).state_dict()
    assert all(torch.equal(read[key], state[key]) for key in state)
    assert "is there already" in str(call("export", run, files / name).exception)
    assert "ends in .safetensors or .pt" in str(call("export", run, files / "model.onnx").exception)
    assert not (files / "model.onnx").exists()


def test_a_catalogue_model_is_exported_by_its_tensors(tmp_path):
    result = tl.run(rounds=2, out=tmp_path / "run")
    assert call("export", tmp_path / "run", tmp_path / "model.safetensors").exit_code == 0
    read = load_file(tmp_path / "model.safetensors")
    model = models.build("logistic", (68,), 2)
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == dict(model.shapes)
    assert torch.equal(models.flatten(model, read), result.params())


def test_what_a_configuration_trains_is_what_is_announced_and_looked_at(files):
    (files / "run.toml").write_text(RUN + '[model]\ntrain = {lora = 2, on = ["body"]}\n')
    looked = call("check", files / "task.py", "--config", files / "run.toml", "--device", "cpu")
    assert looked.exit_code == 0, looked.exception
    began = call("run", files / "run.toml", "--task", files / "task.py", "--out", files / "run")
    assert began.exit_code == 0, began.exception
    for said in (looked.output, began.stderr):
        assert "41 parameters are trained and travel" in said  # 2 × 4, 6 × 2 and the head
        assert "body.lora_A 2×4" in said
        assert "body.weight 6×4" not in said


def test_features_are_made_before_a_task_is_looked_at(files):
    """The module reads what `[data] project` leaves, not what the clients gave."""
    (files / "task.py").write_text(TASK.replace("nn.Linear(4, 6)", "nn.Linear(3, 6)"))
    (files / "run.toml").write_text(RUN + "[data]\nproject = 3\n")
    looked = call("check", files / "task.py", "--config", files / "run.toml", "--device", "cpu")
    assert looked.exit_code == 0, looked.exception
    began = call("run", files / "run.toml", "--task", files / "task.py", "--out", files / "run")
    assert began.exit_code == 0, began.exception


@pytest.mark.parametrize("unit", ["example", "user"])
def test_gradients_are_compared_on_made_up_examples_too(files, monkeypatch, unit):
    """At both levels: what a client's first examples do not show, the smallest and largest numbers may."""
    from trilemma.models.modules import checks

    seen: list[torch.Tensor] = []
    plain = checks.compared

    def watched(model, params, batch):
        seen.append(batch.x)
        return plain(model, params, batch)

    monkeypatch.setattr(checks, "compared", watched)
    task = tl.Task.from_file(files / "task.py").of(3)
    own = torch.cat([torch.as_tensor(np.random.default_rng(c).normal(size=(20 + c, 4))) for c in range(3)])
    inspect(task, by_example=unit == "example")
    dsgd = {"name": "dsgd", "unit": unit, "batch_size": 8}
    privacy = tl.Privacy(threat="ldp", clip=1.0, noise_multiplier=4.0)
    tl.run(task, algorithm=dsgd, privacy=privacy, rounds=1, out=files / "run")
    made = [x for x in seen if not torch.isin(x.float(), own.float()).any()]
    assert len(made) == 4, "two batches by check, and two before the run"
