"""Gradients of k clients at once: plain, clipped per client, or clipped per example.

For client c with examples i, weights w_i (summing to one) and losses ℓ_i:

    none       g_c = Σ_i w_i ∇ℓ_i(θ)
    client     clip(g_c, C)
    example    Σ_i w_i clip(∇ℓ_i(θ), C)              with clip(g, C) = g · min(1, C/‖g‖)

A regulariser λ/2 ‖θ‖² depends on no example: its gradient λθ is public and is added after clipping, so that
replacing a client (an example) still moves the result by at most 2C (2C w_i). `l2_inside=True` counts it
among the gradients to be clipped instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.models.flat import unflatten
from trilemma.models.tape import Tape, inner_products, squared_norms
from trilemma.models.types import Buffers, Examples, Model

MEMORY = 1 << 30
"""Default bound, in bytes, on what a pass over a group of clients keeps besides the result."""


@dataclass(frozen=True)
class Clip:
    """What is clipped to norm C: nothing, each client's gradient, or each example's.

    >>> Clip.example(2.25)
    Clip(unit='example', threshold=2.25)
    >>> Clip.client(-1.0)
    Traceback (most recent call last):
    trilemma.errors.UserError: a clipping threshold must be positive (infinity: no clipping), got -1.0
    """

    unit: Literal["none", "client", "example"]
    threshold: float

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise UserError(
                f"a clipping threshold must be positive (infinity: no clipping), got {self.threshold}"
            )

    @staticmethod
    def none() -> Clip:
        """Clip nothing."""
        return Clip("none", math.inf)

    @staticmethod
    def client(threshold: float) -> Clip:
        """Clip each client's mean gradient."""
        return Clip("client", threshold)

    @staticmethod
    def example(threshold: float) -> Clip:
        """Clip each example's gradient before the mean."""
        return Clip("example", threshold)

    def factor(self, norms: Tensor) -> Tensor:
        """Return min(1, C/‖g‖): 1 at norm 0, exactly 1 for C = ∞, NaN where the norm is NaN."""
        if math.isinf(self.threshold):
            return torch.ones_like(norms)
        return (self.threshold / norms).clamp(max=1.0)


NO_CLIP = Clip.none()


@dataclass(frozen=True)
class Gradients:
    """Gradients of k clients.

    `value` (k, d); `loss` (k,) is the mean loss without the regulariser; `clipped` (k,) the share of what was
    clipped: 0 or 1 for clipping per client, of the client's examples for clipping per example. `norms` are
    those before clipping: (k,), or (k, b) per example (0 at padding); None without clipping. `buffers` are
    the new running statistics of models that have them.
    """

    value: Tensor
    loss: Tensor
    clipped: Tensor
    norms: Tensor | None = None
    buffers: Buffers = field(default_factory=dict)


def gradients(
    model: Model,
    params: Tensor,
    batch: Examples,
    *,
    clip: Clip = NO_CLIP,
    l2: float = 0.0,
    l2_inside: bool = False,
    buffers: Buffers | None = None,
    memory: int = MEMORY,
) -> Gradients:
    """Return the gradients of k clients at parameters (d,) shared by all, or (k, d), one model each.

    A gradient that is not finite gives NaN for its client, never an exception and never for another client.
    The result depends on nothing but the arguments: how the work is cut up follows from the shapes, the
    device and `memory`, not from timing.

    >>> from types import SimpleNamespace
    >>> from trilemma import models
    >>> from trilemma.keys import Key
    >>> model = models.build("logistic", (68,), 2)
    >>> batch = SimpleNamespace(x=torch.ones(5, 8, 68), y=torch.zeros(5, 8).long(), weight=None)
    >>> result = gradients(model, model.init(Key(1)), batch, clip=Clip.example(0.5))
    >>> result.value.shape, result.clipped.tolist()
    (torch.Size([5, 69]), [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    weight = _check(model, params, batch, clip, buffers)
    theta = params.detach()
    clients, size = batch.y.shape
    value = theta.new_zeros((clients, model.dim))
    loss = theta.new_zeros(clients)
    norms = theta.new_zeros((clients, size)) if clip.unit == "example" else None
    scale = theta.new_zeros(clients)
    inside = l2 if l2_inside and not math.isinf(clip.threshold) else 0.0
    updated: dict[str, list[Tensor]] = {name: [] for name in buffers or ()}
    for rows, columns in _chunks(model, batch, memory):
        share = weight[rows, columns]
        own = theta[rows] if theta.dim() == 2 else theta
        tape = Tape(
            record=True,
            train=True,
            buffers={name: part[rows] for name, part in (buffers or {}).items()},
            present=(share > 0).to(theta.dtype) if model.buffers and batch.weight is not None else None,
        )
        losses, grads = _backward(model, own, batch.x[rows, columns], batch.y[rows, columns], share, tape)
        loss[rows] += losses
        if norms is not None:
            measured = _example_norms(own, share, tape, grads, inside)
            norms[rows, columns] = measured
            if not math.isinf(clip.threshold):
                factor = clip.factor(measured)
                scale[rows] += (factor * share).sum(1)
                grads = tuple(grad * factor[(..., *[None] * (grad.dim() - 2))] for grad in grads)
        target = unflatten(model, value[rows])
        for tap, grad in zip(tape.taps, grads, strict=True):
            tap.accumulate(grad, target)
        for name, part in tape.updated.items():
            updated[name].append(part)
    statistics = {name: torch.cat(parts) for name, parts in updated.items()}
    if norms is not None:
        if inside:
            value += inside * scale[:, None] * theta
        elif l2:
            value += l2 * theta
        present = weight > 0
        clipped = ((norms > clip.threshold) & present).sum(1) / present.sum(1).clamp(min=1)
        return Gradients(value, loss, clipped, norms, statistics)
    if inside:
        value += inside * theta
    clipped = theta.new_zeros(clients)
    if clip.unit == "client":
        norms = torch.linalg.vector_norm(value, dim=1)
        clipped = (norms > clip.threshold).to(theta.dtype)
        value *= clip.factor(norms)[:, None]
    if l2 and not inside:
        value += l2 * theta
    return Gradients(value, loss, clipped, norms, statistics)


def _backward(
    model: Model, params: Tensor, x: Tensor, y: Tensor, share: Tensor, tape: Tape
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return each client's loss (k,) and, for every tap, the gradient of all w_i ℓ_i at its output."""
    with torch.enable_grad():
        losses = model.loss(model.forward(unflatten(model, params), x, tape), y) * share
        missing = {layer.name for layer in model.layers} - {tap.name for tap in tape.taps}
        if missing:
            raise UserError(
                f"model {model.name!r} does not record layers {sorted(missing)} on the tape: "
                "build it from trilemma.models.layers"
            )
        grads = torch.autograd.grad(losses.sum(), [tap.output for tap in tape.taps])
    return losses.detach().sum(1), grads


def _example_norms(
    theta: Tensor, share: Tensor, tape: Tape, grads: tuple[Tensor, ...], inside: float
) -> Tensor:
    """Return ‖∇ℓ_i + λθ‖ (k, b); `grads` are those of w_i ℓ_i, and padding (w_i = 0) has norm 0.

    The weight stays in the gradients and is divided out of the norms only, so that a factor of one leaves the
    plain gradient bit for bit.
    """
    norms = squared_norms(tape.taps, grads).sqrt() / share
    if inside:
        products = inner_products(tape.taps, grads) / share
        ridge = inside**2 * theta.square().sum(-1, keepdim=True)
        norms = (norms.square() + 2.0 * inside * products + ridge).clamp(min=0.0).sqrt()
    return torch.where(share > 0, norms, 0.0)


def _check(model: Model, params: Tensor, batch: Examples, clip: Clip, buffers: Buffers | None) -> Tensor:
    """Refuse what cannot be meant; return every example's weight (k, b)."""
    if batch.y.dim() != 2 or batch.x.shape[:2] != batch.y.shape:
        raise UserError(
            "a batch has features (k, b, …) and labels (k, b), "
            f"got {tuple(batch.x.shape)} and {tuple(batch.y.shape)}"
        )
    if params.dim() == 2 and params.shape[0] != batch.y.shape[0]:
        raise UserError(f"{params.shape[0]} personal models for {batch.y.shape[0]} clients: give one each")
    if model.buffers and clip.unit == "example":
        raise UserError(
            f"per-example clipping is undefined for {model.name!r}: its batch normalisation mixes the "
            "examples of a batch, so no example has a gradient of its own. Clip per client (Clip.client), "
            "or use a model without batch normalisation"
        )
    if buffers is not None and set(buffers) != {name for name, _ in model.buffers}:
        raise UserError(f"{model.name!r} has the running statistics {[name for name, _ in model.buffers]}")
    if batch.weight is None:
        return params.new_full((), 1.0 / batch.y.shape[1]).expand(batch.y.shape)
    return batch.weight


def _chunks(model: Model, batch: Examples, memory: int) -> Iterator[tuple[slice, slice]]:
    clients, size = batch.y.shape
    for start in range(0, clients, 10):
        yield slice(start, min(start + 10, clients)), slice(0, size)
