"""Runs that train few coordinates: messages are as short as they should be, mistakes are explained."""

from __future__ import annotations

import pytest
import torch

from trilemma import config, models
from trilemma.base.errors import ConfigError
from trilemma.simulate import assemble, start, step

SMALL = [
    "federation={clients=5, byzantine=1}",
    "attack.name=sf",
    "aggregation.rule=caf",
    "algorithm={name='cafcor', lr=0.1, momentum=0.5, batch_size=8}",
    "privacy={threat='secldp', clip=0.5, epsilon=20.0}",
    "model={name='mlp', hidden=[6]}",
    "run.rounds=2",
]
DIMS = {"head": 14, "['fc1.bias', 'fc2']": 20, "{subspace=9}": 9, "{lora=2}": 2 * 68 + 6 * 2 + 14}


@pytest.mark.parametrize("train", DIMS)
def test_only_what_is_trained_travels(train: str) -> None:
    experiment = assemble(config.parse({}, [*SMALL, f"model.train={train}"]), seed=1)
    progress = start(experiment)
    begun = progress.broadcast["params"]
    for _ in range(2):
        progress, record = step(experiment, progress)
    assert experiment.clients.model.dim == DIMS[train]
    assert record.facts["up_bytes"] == 4 * 5 * DIMS[train]
    assert not torch.equal(progress.chosen, begun)
    whole = models.state_dict(experiment.clients.model, progress.chosen)
    assert {name: tuple(part.shape) for name, part in whole.items()} == {
        "fc1.weight": (6, 68),
        "fc1.bias": (6,),
        "fc2.weight": (2, 6),
        "fc2.bias": (2,),
    }


def test_a_head_starts_where_the_whole_model_does() -> None:
    every, head = (
        assemble(config.parse({}, [*SMALL, f"model.train={train}"]), seed=1) for train in ("all", "head")
    )
    model = every.clients.model
    assert torch.equal(start(every).broadcast["params"][model.last(1).slice], start(head).broadcast["params"])


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("['fc7.*']", "there are fc1.weight, fc1.bias, fc2.weight, fc2.bias"),
        ("{subspace=1000}", "allowed: 1 to 428"),
        ("{lora=7}", "rank 7 is more than 'fc1' has"),
        ("haed", "did you mean 'head'?"),
    ],
)
def test_a_mistake_is_answered_with_what_is_allowed(train: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        assemble(config.parse({}, [*SMALL, f"model.train={train}"]), seed=1)
    assert said in str(refused.value)
