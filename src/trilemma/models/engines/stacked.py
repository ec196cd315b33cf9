"""Gradients of k clients at once: plain, clipped per client, or clipped per example.

For client c with examples i, weights w_i (summing to one) and losses ℓ_i:

    none       g_c = Σ_i w_i ∇ℓ_i(θ)
    client     clip(g_c, C)
    example    Σ_i w_i clip(∇ℓ_i(θ), C)              with clip(g, C) = g · min(1, C/‖g‖)

An example without a finite gradient takes no part where examples are clipped: as if its clipped gradient
were zero, for the others bit for bit what they are without it.

A regulariser λ/2 ‖θ‖² depends on no example: its gradient λθ is public and is added after clipping, so that
replacing a client (an example) still moves the result by at most 2C (2C w_i).

Clients are taken in groups: one forward pass, one backward pass, one product per layer and group, by the
model's engine (`trilemma.models.engines.engine`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.base.recordings import nobody_asks
from trilemma.models.engines.clipping import NO_CLIP, Clip, Lengths, clip_rows
from trilemma.models.engines.engine import Engine, Pass, PassRequest
from trilemma.models.engines.groups import allowed
from trilemma.models.engines.layered import LAYERS
from trilemma.models.engines.precision import in_full
from trilemma.models.flat import unflatten
from trilemma.models.layers.convolution import reproducible
from trilemma.models.types import Buffers, Examples, Model, each_column


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
    weight_decay: float = 0.0,
    buffers: Buffers | None = None,
    keys: Sequence[Key] | None = None,
    memory: int | None = None,
) -> Gradients:
    """Return the gradients of k clients at parameters (d,) shared by all, or (k, d), one model each.

    A gradient that is not finite gives NaN for its client, never an exception and never for another client;
    clipped per example, it is left out.
    The result depends on nothing but the arguments: how the work is cut up follows from the shapes, the
    device and `memory`, not from timing. `buffers` (k, …) are the running statistics of a model that has
    them; without them none are returned. `keys`, one per client, are what a model with dropout draws from.
    `memory` bounds, in bytes, what is kept at a time; by default 4 GiB or an eighth of a GPU's memory.

    >>> from types import SimpleNamespace
    >>> from trilemma import models
    >>> from trilemma.base.keys import Key
    >>> model = models.build("logistic", (68,), 2)
    >>> batch = SimpleNamespace(x=torch.ones(5, 8, 68), y=torch.zeros(5, 8).long(), weight=None)
    >>> result = gradients(model, model.init(Key(1)), batch, clip=Clip.example(0.5))
    >>> result.value.shape, result.clipped.tolist()
    (torch.Size([5, 69]), [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    weight = _weights(model, params, batch, buffers, keys)
    (model.engine or LAYERS).require(model, batch, clip.unit == "example")
    theta = params.detach()
    bound = allowed(theta.device) if memory is None else memory
    sums = sums_of(model, theta, batch, weight, Work(clip, buffers or {}, keys, bound))
    value, norms, clipped = sums.value, sums.norms, torch.zeros_like(sums.loss)
    if clip.unit == "example":
        present = weight > 0
        clipped = ((norms > clip.threshold) & present).sum(1) / present.sum(1).clamp(min=1)
    if clip.unit == "client":
        value, exact = clip_rows(value, clip.threshold)
        norms, clipped = exact.to(value.dtype), (exact > clip.threshold).to(value.dtype)
    if weight_decay:
        value = value.add_(theta, alpha=weight_decay)
    return Gradients(value, sums.loss, clipped, None if clip.unit == "none" else norms, sums.buffers)


@dataclass(frozen=True)
class Work:
    """What is asked of a pass over the clients."""

    clip: Clip
    buffers: Buffers
    keys: Sequence[Key] | None
    memory: int
    first: int = 0
    """Number of the first example within its client's batch."""
    dropout: bool = True
    """Whether the model drops what it would drop in training."""


@dataclass(frozen=True)
class Sums:
    """Each client's Σ_i w_i s_i ∇ℓ_i, with s_i the clipping factors of examples (else 1).

    `norms` (k, b) are the examples', filled when examples are clipped. A careful `value` is in double
    precision.
    """

    value: Tensor
    loss: Tensor
    norms: Tensor
    buffers: Buffers


def sums_of(model: Model, theta: Tensor, batch: Examples, weight: Tensor, work: Work) -> Sums:
    """Go through the clients group by group."""
    clients, size = batch.y.shape[:2]
    dtype = torch.float64 if work.clip.careful else theta.dtype
    value, loss = theta.new_empty((clients, model.dim), dtype=dtype), theta.new_zeros(clients)
    norms = theta.new_zeros((clients, size))
    least = weight.masked_fill(weight <= 0, math.inf).amin(1, keepdim=True) if work.clip.careful else None
    statistics: dict[str, list[Tensor]] = {name: [] for name in work.buffers}
    engine = model.engine or LAYERS
    for rows, columns in engine.groups(model, batch, work.memory, theta.dim() == 2):
        request = _request(theta, batch, weight, work, rows, columns)
        company = Company(least if least is None else least[rows], size)
        group = _pass(engine, model, request, work, loss[rows], company)
        if group.norms is not None:
            norms[rows, columns] = group.norms.to(norms.dtype)
        # Engines overwrite; where a client's examples come in several groups, the later ones are added.
        later = columns.start > 0
        target = torch.empty_like(value[rows]) if later else value[rows]
        with in_full(theta.device):
            group.done.write(unflatten(model, target), group.factor)
        if group.nobody is not None:
            target[group.nobody] = 0.0
        if later:
            value[rows] += target
        for name, fresh in group.done.updated.items():
            statistics[name].append(fresh)
    return Sums(value, loss, norms, {name: torch.cat(parts) for name, parts in statistics.items()})


@dataclass(frozen=True)
class Company:
    """In what company an example is summed: the least positive weight of its client's batch (k, 1), and b.

    Only a careful sum asks for the weight.
    """

    least: Tensor | None
    size: int


def _request(
    theta: Tensor, batch: Examples, weight: Tensor, work: Work, rows: slice, columns: slice
) -> PassRequest:
    """Say what is wanted of one group: the examples `columns` of the clients `rows`."""
    x, y, share = batch.x, batch.y, weight
    if (rows.stop - rows.start, columns.stop - columns.start) != share.shape:
        x, y, share = each_column(x, itemgetter((rows, columns))), y[rows, columns], share[rows, columns]
    return PassRequest(
        params=theta[rows] if theta.dim() == 2 else theta,
        x=x,
        y=y,
        share=share,
        padded=batch.weight is not None,
        by_example=work.clip.unit == "example",
        buffers={name: part[rows] for name, part in work.buffers.items()},
        keys=None if work.keys is None else work.keys[rows],
        dropout=work.dropout,
        first=work.first + columns.start,
    )


@dataclass(frozen=True)
class _Group:
    """What one group gave. Where examples are clipped: their norms and factors.

    `nobody` says which clients have no example with a finite gradient.
    """

    done: Pass
    norms: Tensor | None = None
    factor: Tensor | None = None
    nobody: Tensor | None = None


def _pass(
    engine: Engine, model: Model, request: PassRequest, work: Work, loss: Tensor, company: Company
) -> _Group:
    """Take one group through the model and add to its clients' `loss`.

    Where examples are clipped and some have no finite gradient, it goes through once more without those. What
    is being recorded cannot ask for that: whoever replays it is told which clients need two passes.
    """
    with reproducible():
        done = engine.run(model, request)
    if work.clip.unit != "example":
        loss += done.loss
        return _Group(done)
    with in_full(request.y.device):
        lengths, nobody = done.lengths(), None
    if not work.clip.finite:
        loss += done.loss
        return _Group(done, _norms(lengths, request.share))
    broken = ~torch.isfinite(lengths.norms)  # at empty places, too: 0 · ∞ is no number
    if (hurried := nobody_asks()) is not None:
        hurried.needed.append(1 + broken.any(1))
    elif bool(broken.any()):
        loss[(broken & (request.share > 0)).any(1)] = math.nan  # it says so; an empty place does not
        request, nobody = _without(request, broken)
        with reproducible():
            done = engine.run(model, request)
        with in_full(request.y.device):
            lengths = done.lengths()
    loss += done.loss
    factor = work.clip.factor(lengths, request.share, company.least, company.size)
    return _Group(done, _norms(lengths, request.share), factor, nobody)


def _without(request: PassRequest, broken: Tensor) -> tuple[PassRequest, Tensor]:
    """Take examples out: weight 0, and a sound one of the same client in their place, for 0 · ∞ is no number.

    Returned beside it: which clients have no sound example.
    """
    sound = ~broken & (request.share > 0)
    numbers = torch.arange(sound.shape[1], device=sound.device).expand(sound.shape)
    index = torch.where(broken, sound.to(torch.int8).argmax(1, keepdim=True), numbers)
    rows = torch.arange(sound.shape[0], device=sound.device)[:, None]
    x = each_column(request.x, lambda column: column[rows, index])
    share = torch.where(broken, 0.0, request.share)
    without = replace(request, x=x, y=request.y[rows, index], share=share, padded=True)
    return without, ~sound.any(1)


def _norms(lengths: Lengths, share: Tensor) -> Tensor:
    """Return ‖∇ℓ_i‖ (k, b), bounded from above; the pass is for w_i ℓ_i, padding (w_i = 0) has norm 0.

    The weight stays in the gradients and is divided out of the norms only, so that a factor of one leaves the
    plain gradient bit for bit.
    """
    return torch.where(share > 0, lengths.norms / share, 0.0)


def _weights(
    model: Model, params: Tensor, batch: Examples, buffers: Buffers | None, keys: Sequence[Key] | None
) -> Tensor:
    """Refuse what cannot be meant; return every example's weight (k, b)."""
    columns = {"features": batch.x} if isinstance(batch.x, Tensor) else dict(batch.x)
    shape = batch.y.shape[:2]
    wrong = [tuple(column.shape) for column in columns.values() if column.shape[:2] != shape]
    if len(shape) != 2 or 0 in shape or wrong or not columns:
        raise UserError(
            "a batch has features (k, b, …) and labels (k, b, …), k and b at least 1; "
            f"got {[tuple(column.shape) for column in columns.values()]} and {tuple(batch.y.shape)}"
        )
    if params.dim() == 2 and params.shape[0] != shape[0]:
        raise UserError(f"{params.shape[0]} personal models for {shape[0]} clients: give one each")
    if keys is not None and len(keys) != shape[0]:
        raise UserError(f"{len(keys)} keys for {shape[0]} clients: give one each")
    if buffers is not None and set(buffers) != {name for name, _ in model.buffers}:
        raise UserError(f"{model.name!r} has the running statistics {[name for name, _ in model.buffers]}")
    if batch.weight is None:
        return params.new_full((), 1.0 / shape[1]).expand(shape)
    if batch.weight.shape != shape:
        raise UserError(f"weights {tuple(batch.weight.shape)} must be (clients, examples), {tuple(shape)}")
    return batch.weight
