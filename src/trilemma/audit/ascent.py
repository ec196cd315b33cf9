"""Gradient ascent towards gradients that cancel: whose parts are long, and whose sum is short.

    J(θ, x) = log max_u ‖∂ℓ/∂z_u‖ ‖a_u‖ − log ‖∇ℓ‖         z_u = u(a_u, W)

over the operations u that use a parameter. Where J is large, whoever computes a norm from the parts may be
wrong. The last layer is to be scaled afterwards, and left out of ∇ℓ; the pull of the loss at the outputs is
held, so that nothing saturates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trilemma.audit.catalogue import features_of
from trilemma.audit.own_gradients import default, loss_of, outputs_of, wide
from trilemma.data.types import Features, columns_of, each
from trilemma.models import Model, unflatten

STEPS, SPEED, SLOWER = 80, 0.1, 0.9
"""Steps, how long the first one is as a share of a tensor, and by how much each is shorter than the last."""


class Uses(TorchFunctionMode):
    """Writes down every operation that uses a part of `theta`: its other inputs, and its output."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = theta
        self.found: list[tuple[list[Tensor], Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what goes in and out."""
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        others = [leaf for leaf in given if leaf._base is not self.theta and leaf.is_floating_point()]
        if any(leaf._base is self.theta for leaf in given):
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
            self.found += [(others, leaf) for leaf in made if leaf._base is not self.theta]
        return out


def cancelling(model: Model, theta: Tensor, x: Features, pull: Tensor) -> Tensor:
    """Return J, differentiable, where `pull` is the gradient of the loss at the outputs."""
    # Other kernels of attention have no second derivative.
    with torch.enable_grad(), default(theta.dtype), sdpa_kernel(SDPBackend.MATH), Uses(theta) as uses:
        outputs = outputs_of(model, theta, x)
    below = model.last(1).start or model.dim
    outs = [out for _, out in uses.found]
    whole, *pulls = torch.autograd.grad(
        (outputs * pull).sum(), [theta, *outs], create_graph=True, allow_unused=True
    )
    parts = [
        _log(found) + sum((_log(a) for a in others if bool(torch.isfinite(a).all())), 0.0)
        for (others, _), found in zip(uses.found, pulls, strict=True)
        if found is not None
    ]
    return torch.stack(parts).max() - _log(whole[:below])


def ascend(model: Model, theta: Tensor, x: Features, y: Tensor) -> tuple[Tensor, Features]:
    """Return parameters and a record (1, …) to which gradient ascent on J leads."""
    columns = columns_of(x)
    moving = {name: part for name, part in columns.items() if part.is_floating_point()}
    sizes = [
        part.square().mean().sqrt().clamp(min=0.1).expand(part.shape)
        for part in unflatten(model, theta).values()
    ]
    scale = [
        torch.cat([size.flatten() for size in sizes]),
        *(part.abs().mean() + 1.0 for part in moving.values()),
    ]
    base = [part.double() for part in (theta, *moving.values())]
    with default(torch.float64):
        outputs = outputs_of(model, base[0], x).detach().requires_grad_()
        (pull,) = torch.autograd.grad(loss_of(model, outputs, y), outputs)
    offsets = [torch.zeros_like(part, requires_grad=True) for part in base]
    adam = torch.optim.Adam(offsets, lr=SPEED)
    for step in range(STEPS + 1):
        at = [part + size * off for part, size, off in zip(base, scale, offsets, strict=True)]
        now = features_of({**columns, **dict(zip(moving, at[1:], strict=True))})
        if step < STEPS:
            adam.param_groups[0]["lr"] = SPEED * SLOWER**step
            adam.zero_grad()
            torch.autograd.backward(-cancelling(model, at[0], now, pull))
            adam.step()
    return at[0].detach().float(), each(now, lambda part: wide(part.detach(), torch.float32))


def _log(part: Tensor) -> Tensor:
    return (part.square().sum() + 1e-60).log() / 2
