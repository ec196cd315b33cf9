"""What personalised and compressed methods send and receive is what their papers count."""

from __future__ import annotations

import pytest
from personal_clients import classification, setup

from trilemma import config, models, simulate
from trilemma.base.keys import Key
from trilemma.learning import algorithms


@pytest.mark.parametrize("name", ["lp-proj", "pfedme", "ditto", "rsa", "fedavg", "per-fedavg"])
def test_messages_have_the_counted_size(name: str) -> None:
    """What a client sends and receives is d or D numbers, as the formulas of the paper say."""
    clients = classification(models.build("multinomial", (8,), 4))
    algorithm = algorithms[name]().build(setup(6))
    start = algorithm.init(clients.model, clients.ids, Key(1))
    step = algorithm.client(start.broadcast, start.clients, clients, 0, Key(2))
    size = 21 if name == "lp-proj" else clients.model.dim
    assert step.messages.vectors.shape[1] == size
    assert sum(part.numel() for part in start.broadcast.values()) == size
    assert algorithm.everyone_trains == (name in {"lp-proj", "pfedme", "ditto", "rsa"})


@pytest.mark.parametrize(
    ("algorithm", "down"),
    [
        # LG-FedAvg's head of 100·10 + 10 numbers goes to all 20 clients, though only 5 train.
        ('{name="lg-fedavg",head_layers=1}', 20 * 4 * 1010),
        # Sketch: the model, a bitmap of the positions asked for, a bit for each of those asked for last time.
        ('{name="sketch",columns=12,rows=5,kept=8,second=4}', 5 * (4 * 7110 + 32 * 4 + 32 // 8)),
        ('{name="sketch",columns=12,rows=5,kept=500,second=4}', 5 * (4 * 7110 + 889 + 2000 // 8)),
        ('{name="fedavg"}', 5 * 4 * 7110),
    ],
)
def test_simulated_rounds_count_what_is_sent_to_clients(algorithm: str, down: int) -> None:
    tables = {
        "data": {"name": "synthetic", "size": 20, "clients": 20, "holders": "all"},
        "model": {"name": "mnist-mlp"},
        "federation": {"clients": 20, "sampled": 5},
    }
    experiment = simulate.assemble(config.parse(tables, [f"algorithm={algorithm}"]), 1)
    _, record = simulate.step(experiment, simulate.start(experiment))
    assert record.facts["down_bytes"] == down
    assert record.facts["down_scalars"] == down / 4
