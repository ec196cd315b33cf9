"""Stacked gradients against the obvious loop: every model, every clipping, shared and personal, uneven."""

from __future__ import annotations

import math

import pytest
import torch
from model_oracles import CASES, Stack, module, reference

from trilemma import models
from trilemma.errors import UserError
from trilemma.keys import Key
from trilemma.models import Clip

NAMES = sorted(CASES)
PLAIN = [name for name in NAMES if name != "fashion-resnet"]


def problem(name: str, clients: int = 3, size: int = 4, personal: bool = False, uneven: bool = False):
    """Return a model, parameters and a batch; uneven: padding and weights that are not 1/b."""
    shape, classes, _ = CASES[name]
    model = models.build(name, shape, classes)
    key = Key(11).fold(name)
    params = torch.stack([model.init(key.fold(i)) for i in range(clients)]) if personal else model.init(key)
    generator = key.fold("batch").torch()
    x = torch.randn(clients, size, *shape, generator=generator)
    y = torch.randint(classes, (clients, size), generator=generator)
    weight = None
    if uneven:
        weight = torch.rand(clients, size, generator=generator) + 0.1
        weight[0, -1] = 0.0
        weight[-1, 1:] = 0.0 if not model.buffers else weight[-1, 1:]
        weight /= weight.sum(1, keepdim=True)
    return model, params, Stack(x, y, weight)


def middle(model, params, batch, unit: str) -> float:
    """Return a threshold that clips some and not others."""
    norms = models.gradients(model, params, batch, clip=Clip(unit, math.inf)).norms
    present = norms[norms > 0]
    return float((present.min() + present.max()) / 2)


def close(actual, expected):
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, atol=1e-5 * max(scale, 1e-3), rtol=1e-5)


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
@pytest.mark.parametrize("unit", ["none", "client", "example"])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_loop(name, unit, personal, uneven):
    model, params, batch = problem(name, personal=personal, uneven=uneven)
    if unit == "example" and model.buffers:
        with pytest.raises(UserError, match="per-example clipping is undefined"):
            models.gradients(model, params, batch, clip=Clip.example(1.0))
        return
    threshold = math.inf if unit == "none" else middle(model, params, batch, unit)
    result = models.gradients(model, params, batch, clip=Clip(unit, threshold))
    expected = reference(module(name), params, batch, unit, threshold)
    close(result.value, expected)
    if unit != "none":
        assert 0 < result.clipped.sum() < len(result.clipped)
    assert not result.value.requires_grad


@pytest.mark.parametrize("unit", ["client", "example"])
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn"])
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
def test_regulariser_outside_and_inside(name, unit, personal):
    model, params, batch = problem(name, personal=personal, uneven=True)
    l2 = 0.5
    plain = models.gradients(model, params, batch, clip=Clip(unit, 0.7))
    outside = models.gradients(model, params, batch, clip=Clip(unit, 0.7), l2=l2)
    close(outside.value, plain.value + l2 * params)
    inside = models.gradients(model, params, batch, clip=Clip(unit, 0.7), l2=l2, l2_inside=True)
    close(inside.value, reference(module(name), params, batch, unit, 0.7, l2))
    free = models.gradients(model, params, batch, clip=Clip(unit, math.inf), l2=l2, l2_inside=True)
    close(free.value, models.gradients(model, params, batch, l2=l2).value)
