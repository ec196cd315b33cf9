"""Checks before any ε is spent: a module's path, whether its gradients are right, coupled examples."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.models.engine import Request
from trilemma.models.flat import unflatten
from trilemma.models.modules.engine import ModuleEngine
from trilemma.models.modules.passes import Source
from trilemma.models.modules.randomness import Draws
from trilemma.models.modules.recorder import Log, Recorder
from trilemma.models.precision import exactly
from trilemma.models.tape import Tape
from trilemma.models.taped import TAPE
from trilemma.models.types import Examples, Inputs, Model, each_column

OUTPUTS = 4
"""Examples whose outputs are compared with those in company."""

LOSSES = 128
"""Examples whose losses are: more, for what a loss couples may be rare (a death among survivors)."""


@dataclass(frozen=True)
class Paths:
    """How a model's gradients are computed.

    `way` is "tape", "flat" (all examples as one batch), "mapped" (one example under vmap), "looped" (one
    after the other) or "formed" (every example's whole gradient, as in a random subspace); `note` says why it
    is not a better one. `layers` names the operations that use every trained parameter; `formed` are the
    parameters whose gradients are formed for every example.
    """

    way: str
    layers: Mapping[str, str]
    formed: frozenset[str]
    bytes: int
    note: str = ""


def paths(model: Model, batch: Examples) -> Paths:
    """Return the path of every parameter, for examples like those of `batch`."""
    engine = model.engine
    if not isinstance(engine, ModuleEngine):
        each, way = (engine or TAPE).footprint(model, batch.x, 2), "formed" if engine else "tape"
        names = [segment.name for segment in model.tensors]
        return Paths(way, dict.fromkeys(names, way), frozenset(names if engine else ()), each)
    found = engine.structure(model, batch)
    used = {
        segment.name: ", ".join(found.operations.get(segment.name, ("not used",)))
        for segment in model.tensors
    }
    return Paths(found.way, used, found.formed, found.bytes, found.note)


@exactly()
def verify(model: Model, params: Tensor, batch: Examples, tolerance: float = 1e-3) -> float:
    """Compare the chosen path with single examples by autograd alone; return the largest relative error.

    Two examples of the batch are enough: they show whether the examples were told apart. Dropout is off for
    both. An error above `tolerance` is refused, as clipping would not bound what it is meant to bound. What
    is not finite, in an example or in its gradient, is not compared: whether a model is refused must not tell
    whether somebody's data are broken.

    >>> from torch import nn
    >>> from types import SimpleNamespace
    >>> from trilemma import models
    >>> model = models.from_module(nn.Linear(3, 2), nn.CrossEntropyLoss())
    >>> batch = SimpleNamespace(x=torch.randn(4, 5, 3), y=torch.zeros(4, 5).long(), weight=None)
    >>> verify(model, torch.zeros(8), batch) < 1e-5
    True
    """
    theta = params.detach() if params.dim() == 1 else params.detach()[0]
    engine = model.engine or TAPE
    engine.require(model, batch, True)
    x, y = _sound(batch, 2)
    if not len(y):
        return 0.0
    share = torch.ones(1, len(y), device=y.device)
    inputs = each_column(x, lambda column: column[None])
    request = Request(
        params=theta, x=inputs, y=y[None], share=share, padded=False, by_example=True, dropout=False
    )
    done = engine.run(model, request)
    norms, worst = done.lengths().norms[0], 0.0
    for number in range(len(y)):
        one = slice(number, number + 1)
        expected = _slow(model, theta, each_column(x, itemgetter(one)), y[one])
        out = torch.empty(1, model.dim, device=theta.device)
        chosen = torch.zeros(1, len(y), device=theta.device)
        chosen[0, number] = 1.0
        done.write(unflatten(model, out), chosen)
        scale = float(expected.norm()) or 1.0
        if not math.isfinite(scale):
            continue
        short = float(expected.norm() - norms[number]) / scale  # a bound on the norm, not less than it
        worst = max(worst, float((out[0] - expected).norm()) / scale, short)
    if not worst <= tolerance:
        raise UserError(
            f"the gradients of {model.name!r} differ from those of single examples by {worst:.1e} "
            f"(allowed: {tolerance:.0e}): does its forward pass depend on the other examples of a batch, or "
            "draw random numbers other than by nn.Dropout?"
        )
    return worst


@runtime_checkable
class Projecting(Protocol):
    """An engine whose parameters are coordinates of another model's, as a random subspace's are."""

    @property
    def whole(self) -> Model:
        """The other model."""

    def expand(self, params: Tensor) -> Tensor:
        """Return the other model's parameters (D,) for coordinates (d,)."""

    def project(self, gradient: Tensor) -> Tensor:
        """Return the gradient in the coordinates (d,) for one of the other model (D,)."""


def _slow(model: Model, theta: Tensor, x: Inputs, y: Tensor) -> Tensor:
    """Return the gradient of one example's loss by autograd alone."""
    engine: object = model.engine
    if isinstance(engine, Projecting):
        return engine.project(_slow(engine.whole, engine.expand(theta), x, y))
    flat = theta.clone().requires_grad_()
    with torch.enable_grad():
        if isinstance(model.engine, ModuleEngine):
            source = model.engine.at(y.device)
            net = copy.deepcopy(source.module)
            mine = dict(net.named_parameters())
            with torch.no_grad():
                for name, value in unflatten(model, theta).items():
                    mine[name].copy_(value)
            with Recorder({}, None, Log(), Draws(None, off=True)):
                outputs = net(x) if isinstance(x, Tensor) else net(**x)
            loss = source.loss(getattr(outputs, "logits", outputs), y)
            trained = [mine[segment.name] for segment in model.tensors]
            found = torch.autograd.grad(loss, trained, allow_unused=True)
            parts = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]
            return torch.cat([part.flatten() for part in parts])
        features = each_column(x, lambda column: column[None])
        losses = model.loss(model.forward(unflatten(model, flat), features, Tape(train=True)), y[None])
        return torch.autograd.grad(losses.sum(), flat)[0]


def couples(model: Model, params: Tensor, batch: Examples) -> str:
    """Say how the examples of a batch are coupled; an empty text means they are not.

    Examples are apart if every output is the same in company as alone, and if the loss of a batch pulls every
    output where the loss of the example alone does. How hard it pulls may differ: a mean over the tokens of a
    batch weighs examples by their length, here they all weigh the same. Examples that are not finite are left
    out: the answer is about the model, not about whose data are broken.
    """
    engine = model.engine
    if not isinstance(engine, ModuleEngine):
        return "batch normalisation" if model.buffers else ""
    x, y = _sound(batch, LOSSES)
    with exactly():
        return coupling(
            engine.at(y.device), unflatten(model, params if params.dim() == 1 else params[0]), x, y
        )


def coupling(source: Source, params: Mapping[str, Tensor], x: Inputs, y: Tensor) -> str:
    """See `couples`; `x` (n, …) and `y` (n, …) are some examples."""
    from trilemma.models.modules.adapter import outputs_of

    if len(y) < 2:
        return ""

    def scored(rows: slice) -> Any:
        return outputs_of(source, params, each_column(x, lambda column: column[rows]))

    together = scored(slice(None))
    if not isinstance(together, Tensor):
        return ""
    pulls = _pull(source, together, y)
    for number in range(len(y)):
        one = slice(number, number + 1)
        if number < OUTPUTS:
            alone = scored(one)
            if not bool(torch.isfinite(alone).all()):
                continue
            if not torch.allclose(together[one], alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max())):
                return "the forward pass"
        pull, own = pulls[one].flatten(), _pull(source, together[one], y[one]).flatten()
        if not bool(torch.isfinite(own).all()):
            continue
        along = (pull @ own) / (own @ own).clamp(min=1e-30)
        if float((pull - along * own).norm()) > 1e-3 * float(pull.norm()) or float(along) < 0:
            return "the loss"
    return ""


def _pull(source: Source, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of a batch's loss at the outputs."""
    leaf = outputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = source.given(leaf, y).mean()
        found = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    return torch.zeros_like(leaf) if found is None else found


def _sound(batch: Examples, count: int) -> tuple[Inputs, Tensor]:
    """Return up to `count` finite examples of the client that has the most, padding left out."""
    real = sound(batch)
    row = int(real.sum(1).argmax())
    columns = real[row].nonzero()[:count, 0].to(batch.y.device)
    return each_column(batch.x, lambda column: column[row, columns]), batch.y[row, columns]


def sound(batch: Examples) -> Tensor:
    """Tell which examples (k, b) are there and finite."""
    real = torch.ones(batch.y.shape[:2], dtype=torch.bool) if batch.weight is None else batch.weight.cpu() > 0
    for column in (*([batch.x] if isinstance(batch.x, Tensor) else batch.x.values()), batch.y):
        finite = torch.isfinite(column).cpu()
        real = real & (finite.flatten(2).all(2) if finite.dim() > 2 else finite)
    return real
