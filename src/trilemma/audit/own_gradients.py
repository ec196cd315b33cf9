"""Gradients by autograd's own hand: one record at a time, in double precision, through the model's own code.

`faithful` holds a model's gradients to them, per client and per example.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trilemma.audit.catalogue import records
from trilemma.audit.outcomes import AuditOutcome, Value
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data.own.declared import Declaration
from trilemma.data.types import Batch, Features, each
from trilemma.models import Clip, Model, gradients, unflatten
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.modules.engine import ModuleEngine
from trilemma.models.modules.reference import Projecting

TOLERANCE = 1e-3
"""How far a gradient may be from autograd's own, as a share of it; more where a model has its own type."""

LOOSE = 0.06
"""How far clipped gradients may be from those clipped by their own length: what a bound on it may cost."""

FACES = 9
"""Batches of which gradients are compared, beside two fixed ones."""


def outputs_of(model: Model, theta: Tensor, x: Features) -> Any:
    """Return the outputs for one record (1, …), in the type of `theta`.

    It has a twin beside it: torch gets batch normalisation of a batch of one wrong.
    """
    x = each(x, lambda part: wide(part[[0, 0]], theta.dtype))
    if not isinstance(model.engine, ModuleEngine):
        row = each(x, lambda part: part[None])
        return model.forward(unflatten(model, theta), row, SavedActivations(train=True))[:, :1]
    net = copy.deepcopy(model.engine.source.module).to(theta.dtype)
    for part in net.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # the same gradient, as one can add it up
    given: tuple[Any, Any] = ((x,), None) if isinstance(x, Tensor) else ((), x)
    outputs = functional_call(net, unflatten(model, theta), *given)
    return getattr(outputs, "logits", outputs)[:1]


def loss_of(model: Model, outputs: Any, y: Tensor) -> Tensor:
    """Return the loss of one record."""
    y = wide(y, torch.get_default_dtype())
    if isinstance(model.engine, ModuleEngine):
        return model.engine.source.loss(outputs, y).sum()
    return model.loss(outputs, y[None]).sum()


def own_gradient(model: Model, theta: Tensor, x: Features, y: Tensor) -> tuple[Tensor, int]:
    """Return ∇ℓ of one record (1, …), and how many parameters beside those trained the loss pulls at."""
    engine: object = model.engine
    if isinstance(engine, Projecting):
        found, beside = own_gradient(engine.whole, engine.expand(theta.float()), x, y)
        return engine.project(found), beside
    flat = theta.clone().requires_grad_()
    with torch.enable_grad(), default(theta.dtype):
        loss = loss_of(model, outputs_of(model, flat, x), y)
    return torch.autograd.grad(loss, flat)[0], _parameters(loss)


def faithful(model: Model, declaration: Declaration, key: Key) -> AuditOutcome:
    """Compare gradients of records of different lengths and kinds with autograd's own; refusals are none."""
    pool = records(declaration, key.fold("records"))
    theta = model.init(key) + 0.02 * torch.randn(model.dim, generator=key.fold("off").torch())

    def own(row: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        return own_gradient(model, theta.to(dtype), each(pool.x, itemgetter([row])), pool.y[[row]])

    dtype = torch.float64
    try:
        own(0, dtype)
    except RuntimeError:
        dtype = torch.float32  # what has a type of its own
    worst, facts = 0.0, dict[str, Value]()
    drawn = torch.randint(pool.tame, (FACES, 3), generator=key.fold("faces").torch()).tolist()
    # Twins first: whoever tells the structure of a batch from one that was seen has seen no other lengths.
    for rows in () if model.buffers else ([0, 0, 0], [0, 1, 5], *drawn):
        try:
            found, besides = zip(*(own(row, dtype) for row in rows), strict=True)
        except RuntimeError:
            continue  # records of which the model itself makes nothing
        alone = torch.stack(found).double()
        norms = alone.norm(dim=1, keepdim=True)
        threshold = 0.5 * float(norms.min()) or 1.0
        chosen = itemgetter(torch.tensor([rows]))
        batch = Batch(each(pool.x, chosen), chosen(pool.y))
        clipped = alone * (threshold / norms).clamp(max=1.0)
        for limit, right, cost in ((Clip.none(), alone, 0.0), (Clip.example(threshold), clipped, LOOSE)):
            said, expected = "", right.mean(0)
            try:
                value = gradients(model, theta, batch, clip=limit, keys=[key]).value[0].double()
                error = float((value - expected).norm() / expected.norm().clamp(min=1e-12)) - cost
            except UserError:
                continue
            except Exception as problem:
                error, said = math.inf, f"{type(problem).__name__}: {problem}"
            error = math.inf if besides[0] or math.isnan(error) else error
            if error > worst:
                worst = error
                facts = {"records": str(rows), "clip": limit.unit, "pulled at": besides[0], "said": said}
    allowed = TOLERANCE if dtype == torch.float64 else 50 * TOLERANCE
    return AuditOutcome(f"search, {model.name}", "gradients", worst, allowed, facts=facts)


def wide(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in this type, and what else there is as it is."""
    return part.to(dtype) if part.is_floating_point() else part


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """Let what a module makes be of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _parameters(loss: Tensor) -> int:
    """Count the parameters that a loss pulls at; θ is none."""
    waiting, seen, count = [loss.grad_fn], set(), 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        count += isinstance(getattr(node, "variable", None), nn.Parameter)
        waiting += [after for after, _ in node.next_functions]
    return count
