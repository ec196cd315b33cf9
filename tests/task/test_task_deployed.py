"""The same task between parties: the simulation's numbers, the party's own data only, the module back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from federation_harness import INSTANT, PRIVATE, Direct, check_against_simulation, coordinator, share_seeds
from trilemma import config as configurations
from trilemma import report
from trilemma.cli import app
from trilemma.cli.federation import _line, federation_app
from trilemma.federation.client.account import read_budget
from trilemma.federation.client.spending import write_budgets
from trilemma.federation.operations.pilot import spent
from trilemma.federation.party import provisioning
from trilemma.federation.party.layout import parties
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.task import load_task
from trilemma.privacy.ledger.ledger import Ledger
from trilemma.task import Task

TASK = """
import os
from pathlib import Path
import numpy as np
import torch
from torch import nn
from trilemma import Declaration, Values

clients = 4
metrics = ["accuracy", "auc"]
CALLED = []
expects = Declaration(Values("numbers", (5,)), Values("whole", low=0, high=1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.body.requires_grad_(False)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.body(x)))))

def model():
    torch.manual_seed(3)
    return Net()

def data(client):
    CALLED.append(client)
    rng = np.random.default_rng(client + (Path(__file__).parent / "offset").stat().st_size)
    x = rng.normal(size=(40 + client, 5))
    return x, (x.sum(1) > 0).astype(int)

def test():
    return data(50)
"""

CONFIG = configurations.parse(
    {},
    [
        *PRIVATE,
        "algorithm.unit=example",
        "algorithm.batch_size=16",
        "federation.tolerate=1",
        "run.rounds=3",
    ],
    configurations.Own(4),
).toml()


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "offset").write_text("..")
    return folder / "task.py"


def made(tmp_path, code):
    facts = Federation("own", 4, examples=40, timing=INSTANT, transcript=True)
    found = provisioning.init(tmp_path / "federation", facts, CONFIG, task=code)
    for party in found:
        (party.folder / "offset").write_text("..")
    write_budgets(found[1:], load_task(found[0]), 1e6)
    return found


def test_a_federation_of_an_own_module_is_the_simulation(tmp_path, code):
    found = made(tmp_path, code)
    share_seeds(found, CONFIG)
    runner, _ = coordinator(found, Direct(found))
    runner.go()
    experiment = check_against_simulation(found, CONFIG, "run", Task.from_file(code))
    assert experiment.clients.model.dim == 2 * 5 + 5 * 2 + 2, "what is frozen does not travel"
    result = report.load(tmp_path / "federation")
    assert {"loss", "accuracy", "auc"} == set(result.records[-1].metrics), "the server scores on test()"
    assert result.caveat == ""
    assert all(record.epsilon == math.inf for record in result.records), "the server does not know"
    costs = [spent(found, "run", rounds) for rounds in (0, 1, 2, 3)]
    assert costs[0] is None
    assert [cost[0] for cost in costs[1:]] == sorted({cost[0] for cost in costs[1:]})
    with Ledger(found[2].ledger, read_budget(found[2])) as ledger:
        assert costs[-1] == (ledger.verdict.epsilon, ledger.verdict.accountant)
    assert "accuracy 0." in (line := _line(result.records[-1], costs[-1]))
    assert f"ε {costs[-1][0]:.3g} by {costs[-1][1]}" in line
    assert spent(found[:1], "run", 3) is None, "the server alone has no ledger to read"
    module = load_task(found[0]).assembled.learner
    assert module is not None
    state = result.state_dict()
    assert {"body.weight", "head.bias", "norm.weight"} <= set(state)


def test_a_model_with_batch_normalisation_is_exported_with_a_word_about_its_statistics(tmp_path, code):
    code.write_text(TASK.replace("nn.LayerNorm(5)", "nn.BatchNorm1d(5)"))
    text = configurations.parse({}, ["algorithm.batch_size=16", "run.rounds=1"], configurations.Own(4)).toml()
    found = provisioning.init(
        tmp_path / "federation",
        Federation("own", 4, examples=40, timing=INSTANT, transcript=True),
        text,
        task=code,
    )
    for party in found:
        (party.folder / "offset").write_text("..")
    runner, _ = coordinator(found, Direct(found))
    runner.go()
    target = tmp_path / "model.pt"
    outcome = CliRunner().invoke(app, ["export", str(tmp_path / "federation"), str(target)])
    assert outcome.exit_code == 0, outcome.exception
    assert "those of norm are the ones the model started from" in outcome.output
    assert torch.load(target)["norm.running_mean"].tolist() == [0.0] * 5


def test_a_party_calls_for_nobody_elses_data(tmp_path, code):
    found = made(tmp_path, code)
    (found[3].folder / "task.py").write_text(TASK.replace("CALLED.append(client)", "assert client == 2"))
    assert load_task(found[3]).data.clients == 1
    (found[0].folder / "task.py").write_text(TASK.replace("CALLED.append(client)", "assert client == 50"))
    assert load_task(found[0]).data is None


def test_a_rehearsal_needs_no_numbers(tmp_path, code):
    """One command: clients and examples are looked up, the attack is left to simulations, data are linked."""
    (tmp_path / "run.toml").write_text(
        "[federation]\nbyzantine = 1\n[attack]\nname = 'sf'\n[aggregation]\nrule = 'caf'\n"
        "[algorithm]\nname = 'dsgd'\nbatch_size = 8\n[run]\nrounds = 2\n"
    )
    folder = tmp_path / "pilot"
    outcome = CliRunner().invoke(
        federation_app, ["init", str(folder), "--task", str(code), "--config", str(tmp_path / "run.toml")]
    )
    assert outcome.exit_code == 0, outcome.exception
    assert "4 clients, of whom the poorest holds 40 examples" in outcome.output
    assert "f = 1 liars are tolerated" in outcome.output
    assert "offset from beside" in outcome.output
    found = parties(folder)
    assert len(found) == 5
    assert (found[1].folder / "offset").is_symlink()
    task = load_task(found[4])
    assert task.config.federation.f == 1
    assert task.data is not None
    assert int(task.data.sizes[0]) == 43


def test_a_pilot_that_cannot_be_is_not_left_behind(tmp_path, code):
    code.write_text(TASK.replace("x = rng.normal", "x = np.nan * rng.normal"))
    outcome = CliRunner().invoke(federation_app, ["init", str(tmp_path / "pilot"), "--task", str(code)])
    assert "client 0, row 0, column 0: nan" in str(outcome.exception)
    assert not (tmp_path / "pilot").exists()


def test_dropout_is_drawn_from_keys():
    """Or the federation could not be the simulation: the same key, the same masks."""
    net = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 2))
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    task = Task(model=net, clients=[(x, y)])
    settings = configurations.parse({}, ["algorithm.batch_size=10"], configurations.Own(1))
    from trilemma.simulate import assemble, engine

    steps = [engine.step(e, engine.start(e))[0] for e in (assemble(settings, 1, task) for _ in range(2))]
    assert torch.equal(steps[0].broadcast["params"], steps[1].broadcast["params"])
