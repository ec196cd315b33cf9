"""Modules of others: gradients per client and per example are those of the loop, or refused in words."""

from __future__ import annotations

import copy

import others_networks  # noqa: F401 (it adds to OTHERS)
import pytest
import torch
from others import CLIENTS, OTHERS, REFUSED, SINGLE, SIZE
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models import Clip
from trilemma.models.types import each_column
from trilemma.testing.examples import Stack, clip

FLAT = [
    *("batch-norm1d-eval", "batch-norm2d-eval", "layer-scale", "layer-scale-in-place", "rms-norm-by-hand"),
    *(
        "rnn-0",
        "rnn-1",
        "rnn-2",
        "rnn-3",
        "xcit",
        "convnext",
        "bert",
        "gpt2",
        "vit",
        "llama",
        "qwen2",
        "mistral",
        "gemma",
    ),
]
"""What is common, and goes through as one batch."""


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return OTHERS[name].module()


def looped(name: str, module: nn.Module) -> list[list[Tensor]]:
    """Return ∇ℓ_i of every client and example, one by one, in double precision where the module can."""
    other, double = OTHERS[name], name not in SINGLE
    net = copy.deepcopy(module)
    net = net.double() if double else net
    trained = [part for part in net.parameters() if part.requires_grad]

    def one(row: int, column: int) -> Tensor:
        # As a batch of two alike: torch's own batch normalisation is wrong for one (`statistics.frozen`).
        x = each_column(
            other.x,
            lambda part: part[row, [column] * 2].to(
                torch.float64 if double and part.is_floating_point() else part.dtype
            ),
        )
        outputs = net(x) if isinstance(x, Tensor) else net(**x)
        loss = other.loss(getattr(outputs, "logits", outputs), other.y[row, [column] * 2])
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
        return torch.cat([part.to_dense().double().flatten() for part in parts])

    torch.set_default_dtype(torch.float64 if double else torch.float32)
    try:
        return [[one(row, column) for column in range(SIZE)] for row in range(CLIENTS)]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in REFUSED])
def test_gradients_are_those_of_the_loop(name):
    """Shown in one order, and then to the same model in the other: nothing may be remembered of lengths."""
    other, module = OTHERS[name], made(name)
    model = models.from_module(module, other.loss)
    theta = parameters_to_vector(part for part in module.parameters() if part.requires_grad).detach().float()
    found = looped(name, module)
    threshold = float(torch.tensor([[g.norm() for g in row] for row in found]).median())
    turned = Stack(each_column(other.x, lambda part: part.flip(0, 1)), other.y.flip(0, 1))
    for batch, rows in ((Stack(other.x, other.y), found), (turned, [row[::-1] for row in found[::-1]])):
        for limit in (Clip.none(), Clip.client(threshold), Clip.example(threshold, careful=True)):
            value = models.gradients(model, theta, batch, clip=limit).value.double()
            for mine, own in zip(value, rows, strict=True):
                if limit.unit == "example":
                    expected = torch.stack([clip(gradient, threshold) for gradient in own]).mean(0)
                else:
                    expected = clip(torch.stack(own).mean(0), limit.threshold)
                away = float((mine - expected).norm())
                assert away <= SINGLE.get(name, 1e-4) * float(expected.norm()), limit.unit


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradient_per_example_is_refused_in_words(name):
    other = OTHERS[name]

    def clipped() -> None:
        model = models.from_module(made(name), other.loss)
        models.gradients(model, model.init(Key(1)), Stack(other.x, other.y), clip=Clip.example(1.0))

    with pytest.raises(UserError, match=REFUSED[name]):
        clipped()


@pytest.mark.parametrize("name", [name for name in FLAT if name in OTHERS])
def test_what_is_common_goes_through_as_one_batch(name):
    other = OTHERS[name]
    model = models.from_module(made(name), other.loss)
    assert models.paths(model, Stack(other.x, other.y)).way == "flat"
