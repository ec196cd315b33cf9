"""Attacks on final models find what is there, stay below what is certified, and refute what is false."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import binom

from federation_harness import PRIVATE, Direct, coordinator, make, small_config
from trilemma import config as configurations
from trilemma import models
from trilemma.attacks.backdoor import Backdoor
from trilemma.audit.final.membership import Shadow, lira, loss_threshold
from trilemma.audit.final.others import attributes, inversion, marked
from trilemma.audit.final.run import on_client, on_file, on_run, on_server
from trilemma.audit.final.target import AskedRecords, FinalModel, at_least, at_most
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.cli.attack import attack_command
from trilemma.evidence.gather import digest_of
from trilemma.simulate import run

KEY = Key(1)


def noise(count: int, shape: tuple[int, ...], seed: int) -> AskedRecords:
    """Records whose answers are coins: what a model knows of them it has by heart."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, *shape, generator=draw), torch.randint(2, (count,), generator=draw)
    return AskedRecords(x, y)


def by_heart(members: AskedRecords, steps: int = 300) -> tuple[models.Model, torch.Tensor]:
    """A logistic model that has learnt its records by heart."""
    model = models.build("logistic", members.x.shape[1:], 2)
    weights = torch.zeros(model.dim, requires_grad=True)
    optimiser = torch.optim.Adam([weights], lr=0.1)
    signs = 2.0 * members.y - 1
    for _ in range(steps):
        optimiser.zero_grad()
        flat = members.x.flatten(1)
        torch.nn.functional.softplus(-signs * (flat @ weights[:-1] + weights[-1])).mean().backward()
        optimiser.step()
    return model, weights.detach()


def target(members: AskedRecords, others: AskedRecords, epsilon: float | None = None) -> FinalModel:
    model, params = by_heart(members)
    if models.evaluate(model, params, members.x, members.y).accuracy < 0.5:
        params = -params  # the other class comes first in this model
    return FinalModel(model, params, "0" * 64, members, others, epsilon, 1e-5, "", classes=2)


@pytest.fixture(scope="module")
def learnt():
    return target(noise(100, (200,), 1), noise(100, (200,), 2))


def test_what_is_known_by_heart_is_found_by_its_loss(learnt):
    found = loss_threshold(learnt, KEY)
    assert found.found > 0.9
    assert found.allowed is None


def test_a_false_certificate_is_refuted_and_a_true_one_is_not(learnt):
    assert loss_threshold(replace(learnt, epsilon=0.5), KEY).exceeds
    ignorant = replace(learnt, params=torch.zeros(learnt.model.dim), epsilon=0.0)
    assert not loss_threshold(ignorant, KEY).exceeds


def test_lira_finds_what_is_known_by_heart(learnt):
    rows = np.arange(100)
    halves = [np.arange(50), np.arange(50, 100)]
    shadows = []
    for half in halves:
        assert learnt.members is not None
        _, params = by_heart(learnt.members.some(half))
        sign = 1.0 if float(torch.dot(params, learnt.params)) > 0 else -1.0
        shadows.append(Shadow(sign * params, half))
    found = lira(learnt, shadows, rows, KEY)
    assert found.found > 0.8
    assert "2 shadow models" in found.attack


def test_an_attribute_of_a_record_that_is_known_by_heart_is_inferred_better():
    """One column of two values, among few others: the loss of a record known by heart tells it."""

    def made(seed):
        found = noise(60, (80,), seed)
        found.x[:, 0] = 4.0 * (torch.rand(60, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
        return found

    found = attributes(target(made(1), made(2)), KEY)
    assert found.found > 0.05
    assert found.attack == "attribute inference (column 0, the worst of 1)"
    plain = target(noise(20, (5,), 1), noise(20, (5,), 2))
    with pytest.raises(UserError, match="no column"):
        attributes(plain, KEY)


def test_an_image_of_a_model_that_knows_one_by_heart_lies_close_to_it():
    draw = torch.Generator().manual_seed(3)
    members = AskedRecords(torch.rand(2, 1, 6, 6, generator=draw).round(), torch.tensor([0, 1]))
    others = AskedRecords(torch.rand(2, 1, 6, 6, generator=draw).round(), torch.tensor([0, 1]))
    found = inversion(target(members, others), KEY)
    assert found.found == 1.0
    assert found.allowed is None


def test_a_mark_that_was_taught_is_found_and_one_that_was_not_is_not():
    clean, others = noise(200, (40,), 1), noise(200, (40,), 2)
    taught = AskedRecords(
        torch.cat([clean.x, Backdoor().marked(clean.x, 1)]), torch.cat([clean.y, 0 * clean.y])
    )
    found = marked(target(taught, others))
    assert found.found > 0.9
    untaught = target(clean, others)
    assert abs(marked(replace(untaught, params=0 * untaught.params)).found - 0.5) in (0.0, 0.5)


def test_what_a_share_surely_is_holds_as_often_as_is_said():
    """The bound fails in at most 1 % of draws, whatever the true share is."""
    for true in (0.02, 0.5, 0.9):
        law = binom(60, true)
        low = sum(law.pmf(k) for k in range(61) if at_least(k, 60) > true)
        high = sum(law.pmf(k) for k in range(61) if at_most(k, 60) < true)
        assert max(low, high) <= 0.01


def test_a_simulated_runs_model_is_attacked_by_all(tmp_path):
    config = configurations.parse(
        {},
        [
            *("federation.clients=4", "federation.tolerate=1", "run.rounds=2", "algorithm.name=cafcor"),
            *("aggregation.rule=caf", "privacy.threat=ldp", "privacy.sigma_ind=1.0", "data.examples=400"),
        ],
    )
    run(config, tmp_path / "run")
    found = on_run(tmp_path / "run", digest_of, None, 2, 20)
    names = {one.attack.partition(",")[0].partition(" (")[0] for one in found.tried}
    assert {"membership", "attribute inference", "backdoor", "canaries in one run"} <= names
    assert any("LiRA with 2" in one.attack for one in found.tried)
    assert not any(one.exceeds for one in found.tried)
    assert [name for name, _ in found.skipped] == ["model inversion"]


def test_records_stay_at_their_clients(tmp_path):
    """The server measures nothing on records; a client attacks with its own, and nothing is written."""
    config = small_config(3, *PRIVATE, rounds=1)
    parties = make(tmp_path / "federation", 3, config)
    coordinator(parties, Direct(parties), run="default")[0].go()
    spent = parties[1].ledger.read_bytes()
    found = on_server(tmp_path / "federation", None, digest_of, 20)
    assert not {"membership", "attribute inference"} & {one.attack.partition(",")[0] for one in found.tried}
    assert all("parties'" in why for name, why in found.skipped if name == "membership")
    before = sorted(path for path in parties[1].folder.rglob("*") if path.is_file())
    own = on_client(parties[1].folder, None, digest_of, 20)
    assert any(one.attack == "membership, by loss" for one in own.tried)
    assert sorted(path for path in parties[1].folder.rglob("*") if path.is_file()) == before
    assert parties[1].ledger.read_bytes() == spent


def test_bad_questions_are_refused(tmp_path):
    with pytest.raises(UserError, match="pairs"):
        attack_command(tmp_path, None, None, None, 3, 10, None)
    (tmp_path / "attacks.json").write_text("")
    with pytest.raises(UserError, match="there already"):
        attack_command(tmp_path, None, None, None, 0, 10, tmp_path / "attacks.json")


def test_a_model_in_a_file_is_attacked_with_its_task_and_another_tasks_is_refused(tmp_path):
    from safetensors.torch import save_file

    task = tmp_path / "task.py"
    task.write_text(
        "import torch\nfrom torch import nn\nclients = 3\n"
        "def model(): return nn.Linear(4, 2)\n"
        "def data(client):\n"
        "    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(client))\n"
        "    return x, (x[:, 0] > 0).long()\n"
        "def test(): return data(99)\n"
    )
    net = torch.nn.Linear(4, 2)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    found = on_file(tmp_path / "model.safetensors", task, digest_of)
    assert {one.attack for one in found.tried} == {"membership, by loss", "backdoor (a mark on examples)"}
    assert all(one.allowed is None for one in found.tried)
    save_file(torch.nn.Linear(5, 2).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="no tensor weight of shape"):
        on_file(tmp_path / "other.safetensors", task, digest_of)
    (tmp_path / "broken.safetensors").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"broken.safetensors"):
        on_file(tmp_path / "broken.safetensors", task, digest_of)
