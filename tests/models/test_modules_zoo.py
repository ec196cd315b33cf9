"""Gradients of any module: all paths against a loop over examples, written slowly and obviously."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from module_zoo import WEIGHT, ZOO, Exhibit
from torch import Tensor, nn

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models import Clip
from trilemma.testing.examples import Stack, clip


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    module = ZOO[name].module()
    if any(isinstance(part, nn.LazyLinear) for part in module.modules()):
        module(ZOO[name].x[0])
    return module


def one_gradient(module: nn.Module, theta: Tensor, exhibit: Exhibit, row: int, columns: list[int]) -> Tensor:
    """Return the gradient of the loss of some examples of a client, as one batch."""
    net = copy.deepcopy(module)
    trained = [part for part in net.parameters() if part.requires_grad]
    nn.utils.vector_to_parameters(theta.clone(), trained)
    if isinstance(exhibit.x, Tensor):
        outputs = net(exhibit.x[row, columns])
    else:
        outputs = net(**{name: part[row, columns] for name, part in exhibit.x.items()}).logits
    loss = exhibit.loss(outputs, exhibit.y[row, columns])
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    parts = [
        torch.zeros_like(part) if grad is None else grad for part, grad in zip(trained, found, strict=True)
    ]
    return torch.cat([part.flatten() for part in parts])


def slow(module: nn.Module, params: Tensor, exhibit: Exhibit) -> list[list[Tensor]]:
    """Return ∇ℓ_i of every client and example, one by one."""
    own = params.expand(3, -1)
    return [[one_gradient(module, own[row], exhibit, row, [i]) for i in range(4)] for row in range(3)]


def clipped_sums(found: list[list[Tensor]], weight: Tensor, limit: Clip) -> Tensor:
    """Return Σ_i w_i clip(∇ℓ_i) of every client."""
    rows = []
    for gradients, shares in zip(found, weight, strict=True):
        total = torch.zeros_like(gradients[0])
        for gradient, share in zip(gradients, shares, strict=True):
            if share > 0:
                total += share * (clip(gradient, limit.threshold) if limit.unit == "example" else gradient)
        rows.append(clip(total, limit.threshold) if limit.unit == "client" else total)
    return torch.stack(rows)


def close(actual: Tensor, expected: Tensor) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("bert", "gpt") else [])
        for name in ZOO
        if not ZOO[name].mixes
    ],
)
def test_every_module_agrees_with_the_loop(name, personal):
    if name in ("bert", "gpt"):
        pytest.importorskip("transformers")
    exhibit, module = ZOO[name], made(name)
    model = models.from_module(module, exhibit.loss)
    theta = model.init(Key(1))
    if personal:
        theta = theta + 0.05 * torch.randn(3, model.dim, generator=Key(2).torch())
    found = slow(module, theta, exhibit)
    for weight in (None, WEIGHT):
        batch = Stack(exhibit.x, exhibit.y, weight)
        shares = torch.full((3, 4), 0.25) if weight is None else weight
        examples = models.gradients(model, theta, batch, clip=Clip.example(math.inf)).norms
        threshold = float(examples[examples > 0].median())
        for limit in (Clip.none(), Clip.client(threshold / 2), Clip.example(threshold)):
            result = models.gradients(model, theta, batch, clip=limit)
            close(result.value, clipped_sums(found, shares, limit))


def test_batch_normalisation_is_the_clients_own_and_refuses_examples():
    exhibit, module = ZOO["resnet-batch"], made("resnet-batch")
    model = models.from_module(module, exhibit.loss)
    theta = model.init(Key(1))
    start = model.initial_buffers(3)
    result = models.gradients(model, theta, Stack(exhibit.x, exhibit.y, WEIGHT * 0 + 0.25), buffers=start)
    padded = models.gradients(model, theta, Stack(exhibit.x, exhibit.y, WEIGHT), buffers=start)
    for row in range(3):
        close(result.value[[row]], one_gradient(module, theta, exhibit, row, [0, 1, 2, 3])[None])
    close(padded.value[[1]], one_gradient(module, theta, exhibit, 1, [0, 1])[None])
    net = copy.deepcopy(module)
    net(exhibit.x[1][:2])
    torch.testing.assert_close(padded.buffers["1.mean"][1], net[1].running_mean)
    torch.testing.assert_close(padded.buffers["1.variance"][1], net[1].running_var)
    with pytest.raises(UserError, match="GroupNorm"):
        models.gradients(model, theta, Stack(exhibit.x, exhibit.y), clip=Clip.example(1.0))
