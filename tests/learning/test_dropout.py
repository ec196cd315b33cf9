"""Dropout in local training: what is dropped depends on seed, round, client and step, never on company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from personal_clients import classification, rounds, setup
from torch import Tensor, nn

from trilemma import models
from trilemma.base.keys import Key
from trilemma.learning import algorithms
from trilemma.learning.personal.per_fedavg import hessian_product
from trilemma.models.engines import stacked
from trilemma.models.types import Model

SOLVES = {"local_rounds": 2, "inner_steps": 2, "batch_size": 16}
STEPS = {"local_steps": 2, "batch_size": 16}
BRIEF: dict[str, dict[str, Any]] = {
    "lp-proj": SOLVES,
    "pfedme": SOLVES,
    "rsa": SOLVES,
    "fedavg": STEPS,
    "ditto": {**STEPS, "inner_steps": 2},
    "lg-fedavg": STEPS,
    "per-fedavg": {**STEPS, "order": "product"},
    "local": {"steps": 2, "batch_size": 16},
    "lbgm": {},
    "qsgd": {},
    "dgc": {},
    "sketch": {},
}


def _model(rate: float = 0.5) -> Model:
    net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Dropout(rate), nn.Linear(12, 4))
    return models.from_module(net, nn.CrossEntropyLoss())


@pytest.mark.parametrize("name", BRIEF)
def test_clients_drop_the_same_alone_as_in_company(name: str) -> None:
    clients = classification(_model())
    algorithm = algorithms[name](**BRIEF[name]).build(setup(6))
    start = algorithm.init(clients.model, clients.ids, Key(1))
    together = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    again = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    assert torch.equal(together.messages.vectors, again.messages.vectors)
    alone = {field: value[3:4] for field, value in start.clients.items()}
    step = algorithm.client(start.broadcast, alone, clients.only(3), 0, Key(2))
    torch.testing.assert_close(step.messages.vectors[0], together.messages.vectors[3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.report["loss"][0], together.report["loss"][3])
    torch.testing.assert_close(
        algorithm.evaluated(start.broadcast, alone, clients.only(3), Key(4)).expand(1, -1)[0],
        algorithm.evaluated(start.broadcast, start.clients, clients, Key(4)).expand(6, -1)[3],
    )


@pytest.mark.parametrize("name", BRIEF)
def test_every_round_client_and_step_drops_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two gradients at different batches share a key; the Hessian product's differences have to."""
    seen: list[int] = []
    plain = models.gradients

    def watched(*given: Any, keys: Any = None, **named: Any) -> models.Gradients:
        seen.extend(key.integer() for key in keys)
        return plain(*given, keys=keys, **named)

    monkeypatch.setattr(models, "gradients", watched)
    monkeypatch.setattr(stacked, "gradients", watched)  # what local steps replay
    brief = {field: value for field, value in BRIEF[name].items() if field != "order"}
    rounds(algorithms[name](**brief), classification(_model()), 2)
    assert len(seen) == len(set(seen)) >= 12


def test_the_hessian_product_is_that_of_the_network_that_was_drawn() -> None:
    """With masks that differ between its two gradients the difference would be noise over a small number."""
    clients = classification(_model(), clients=2)
    w, batch = clients.model.init(Key(1)), clients.everything()
    v = torch.randn(2, clients.model.dim, generator=Key(2).torch())
    keys = [Key(3), Key(4)]

    def gradient(at: Tensor) -> Tensor:
        return models.gradients(clients.model, at, batch, keys=keys).value

    found = hessian_product(clients.model, w, v, batch, {}, keys)
    size = v.norm(dim=1, keepdim=True)
    wide = (gradient(w + 0.05 * v / size) - gradient(w - 0.05 * v / size)) * size / 0.1
    torch.testing.assert_close(found, wide, rtol=0.05, atol=0.02)
