"""Checks before any ε is spent: a module's path, whether its gradients are right, coupled examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.engines.layered import LAYERS
from trilemma.models.engines.precision import exactly
from trilemma.models.flat import unflatten
from trilemma.models.modules.engine import ModuleEngine
from trilemma.models.modules.passes import PassSource
from trilemma.models.modules.reference import COMPARED, Comparison, Precision, Reference
from trilemma.models.types import Examples, Inputs, Model, each_column

OUTPUTS = 4
"""Examples whose outputs are compared with those in company."""

LOSSES = 128
"""Examples whose losses are: more, for what a loss couples may be rare (a death among survivors)."""


@dataclass(frozen=True)
class Paths:
    """How a model's gradients are computed.

    `way` is "layers" (of this package), "flat" (all examples as one batch), "mapped" (one example under
    vmap), "looped" (one after the other) or "formed" (every example's whole gradient, as in a random
    subspace); `note` says why it is not a better one. `layers` names the operations that use every trained
    parameter; `formed` are the parameters whose gradients are formed for every example.
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
        each, way = (engine or LAYERS).footprint(model, batch.x, 2), "formed" if engine else "layers"
        names = [segment.name for segment in model.tensors]
        return Paths(way, dict.fromkeys(names, way), frozenset(names if engine else ()), each)
    found = engine.structure(model, batch)
    used = {
        segment.name: ", ".join(found.operations.get(segment.name, ("not used",)))
        for segment in model.tensors
    }
    return Paths(found.way, used, found.formed, found.bytes, found.note)


def verify(model: Model, params: Tensor, batch: Examples) -> float:
    """Compare the chosen way with a plain loop by autograd alone; return the largest relative error.

    >>> from torch import nn
    >>> from types import SimpleNamespace
    >>> from trilemma import models
    >>> model = models.from_module(nn.Linear(3, 2), nn.CrossEntropyLoss())
    >>> batch = SimpleNamespace(x=torch.randn(4, 5, 3), y=torch.zeros(4, 5).long(), weight=None)
    >>> verify(model, torch.zeros(8), batch) < 1e-5
    True
    """
    return compared(model, params, batch).error


@exactly()
def compared(model: Model, params: Tensor, batch: Examples) -> Comparison:
    """Compare the chosen way with a plain loop by autograd alone.

    A way whose gradients differ is not taken from then on; if none is left, the model is refused, as clipping
    would not bound what it is meant to bound. What is not finite, in an example or in its gradient, is not
    compared: whether a model is refused must not tell whether somebody's data are broken.
    """
    theta = params.detach() if params.dim() == 1 else params.detach()[0]
    engine = model.engine or LAYERS
    engine.require(model, batch, False)
    loop = Reference(model, theta, *_sound(batch, COMPARED))
    found = loop.compare(partial(engine.run, model))
    while not found.right and isinstance(engine, ModuleEngine) and engine.avoid(model, batch, found.error):
        found = loop.compare(partial(engine.run, model))
    if not found.right:
        raise UserError(
            f"the gradients of {model.name!r} differ from those of a plain loop over examples by "
            f"{found.error:.1e} (allowed: {found.allowed:.0e}): its forward pass does not give an example "
            "what it gives it alone, or torch's own rules for it are wrong"
        )
    return found


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


def coupling(source: PassSource, params: Mapping[str, Tensor], x: Inputs, y: Tensor) -> str:
    """See `couples`; `x` (n, …) and `y` (n, …) are some examples."""
    from trilemma.models.modules.adapter import outputs_of

    if len(y) < 2:
        return ""

    def scored(rows: slice) -> Any:
        return outputs_of(source, params, each_column(x, lambda column: column[rows]))

    def same(one: Tensor, other: Tensor) -> bool:
        rough = seen.tolerance
        size = float(other.nan_to_num().abs().max())
        return torch.allclose(one, other, rtol=rough, atol=0.1 * rough * size, equal_nan=True)

    with Precision() as seen:  # type: ignore[no-untyped-call]
        together = scored(slice(None))
    if not isinstance(together, Tensor):
        return ""
    if not same(scored(slice(None)), together):
        raise UserError(
            "the module's forward pass draws from torch's own generator: gradients would differ from run to "
            "run. Use nn.Dropout, which draws from keys, or draw outside the module"
        )
    for number in range(min(OUTPUTS, len(y))):
        one = slice(number, number + 1)
        alone = scored(one)
        if bool(torch.isfinite(alone).all()) and not same(together[one], alone):
            return "the forward pass"
    # Outputs far from zero, as those of features that nobody scaled: a loss that is sure pulls by rounding
    # alone, and rounding looks like company. Such examples are looked at again where no output is large.
    calm = together / together.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1)
    faint = 16 * torch.finfo(together.dtype).eps * max(_strongest(source, at, y) for at in (together, calm))
    doubtful = _led_astray(source, together, y, seen.tolerance, faint)
    again = _led_astray(source, calm, y, seen.tolerance, 0.0) if doubtful else set()
    return "the loss" if doubtful is None or again is None or again else ""


def _strongest(source: PassSource, outputs: Tensor, y: Tensor) -> float:
    """Return the length of the largest pull at an example's outputs."""
    return float(_pull(source, outputs, y).reshape(len(y), -1).norm(dim=1).nan_to_num(0.0, 0.0).max())


def _led_astray(
    source: PassSource, outputs: Tensor, y: Tensor, tolerance: float, faint: float
) -> set[int] | None:
    """Return which examples others seem to pull, none of them harder than `faint`; None: some are."""
    pulls, found = _pull(source, outputs, y), set()
    for number in range(len(y)):
        one = slice(number, number + 1)
        pull, own = pulls[one].flatten(), _pull(source, outputs[one], y[one]).flatten()
        if not bool(torch.isfinite(own).all()):
            continue
        along, length = (pull @ own) / (own @ own).clamp(min=1e-30), float(pull.norm())
        if float((pull - along * own).norm()) > tolerance * length or float(along) < 0:
            if not length <= faint:
                return None
            found.add(number)
    return found


def _pull(source: PassSource, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of a batch's loss at the outputs."""
    leaf = outputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        loss = source.given(leaf, y).mean()
        found = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    return torch.zeros_like(leaf) if found is None else found


def few(batch: Examples, count: int) -> tuple[Inputs, Tensor]:
    """Return up to `count` examples: finite ones where there are any, else zeros."""
    x, y = _sound(batch, count)
    if len(y):
        return x, y
    nothing = each_column(batch.x, lambda column: torch.zeros_like(column[0, :1]))
    return nothing, torch.zeros_like(batch.y[0, :1])


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
