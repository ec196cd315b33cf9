"""What holds for every registered model, whoever wrote it: no oracle of its own needed.

Gradients of all clients at once, plain and clipped per example, against a loop over the examples through the
model's own forward pass; shared and personal parameters.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from trilemma import models
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.models import Clip
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.modules.engine import ModuleEngine
from trilemma.testing import chosen
from trilemma.testing.examples import Stack, clip

NAMES = sorted(chosen.names("model"))


def build(name: str) -> tuple[models.Model, tuple[int, ...], int]:
    """Return the model for the first shape it takes, and that shape."""
    for shape, classes in chosen.shapes():
        try:
            return models.build(name, shape, classes), shape, classes
        except ConfigError:
            continue
    raise AssertionError(f"{name} takes none of {chosen.shapes()}; say --shape and --classes")


def through_forward(model: models.Model, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of Σ w_i ℓ_i by plain autograd through the model's own forward pass."""
    flat = theta.clone().requires_grad_()
    params = models.unflatten(model, flat)
    if isinstance(model.engine, ModuleEngine):
        module, loss = model.engine.source.module, model.engine.source.loss
        singles = [
            loss(functional_call(module, dict(params), (a[None],)), b[None])
            for a, b in zip(x, y, strict=True)
        ]
        losses = torch.stack(singles)
    else:
        losses = model.loss(model.forward(params, x[None], SavedActivations(train=True)), y[None])[0]
    return torch.autograd.grad((losses * weight).sum(), flat)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
def test_gradients_are_those_of_the_forward_pass(name: str, personal: bool) -> None:
    model, shape, classes = build(name)
    key = Key(21).fold(name)
    params = torch.stack([model.init(key.fold(i)) for i in range(2)]) if personal else model.init(key)
    generator = key.fold("batch").torch()
    shares = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
    batch = Stack(
        torch.randn(2, 3, *shape, generator=generator),
        torch.randint(classes, (2, 3), generator=generator),
        shares,
    )
    plain = models.gradients(model, params, batch)
    rows = list(zip(params if personal else [params] * 2, batch.x, batch.y, shares, strict=True))
    expected = torch.stack([through_forward(model, *row) for row in rows])
    torch.testing.assert_close(plain.value, expected, atol=1e-5, rtol=1e-4)
    if model.buffers:
        return
    one = torch.ones(1)
    clipped = [
        torch.stack(
            [
                w * clip(through_forward(model, theta, a[None], b[None], one), 0.5)
                for a, b, w in zip(x, y, weight, strict=True)
            ]
        ).sum(dim=0)
        for theta, x, y, weight in rows
    ]
    result = models.gradients(model, params, batch, clip=Clip.example(0.5))
    torch.testing.assert_close(result.value, torch.stack(clipped), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_every_model_has_a_summary_and_evaluates(name: str) -> None:
    assert models.models.summary(name).endswith(".")
    model, shape, _ = build(name)
    buffers = model.initial_buffers(1) if model.buffers else None
    y = torch.zeros(5, dtype=torch.int64)
    score = models.evaluate(model, model.init(Key(1)), torch.zeros(5, *shape), y, buffers=buffers)
    assert score.examples == 5
    assert 0 <= score.accuracy <= 1
    assert score.loss > 0
