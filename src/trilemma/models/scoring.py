"""Loss and accuracy of one model, or of one model per client, on shared or per-client data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.models.flat import unflatten
from trilemma.models.groups import CACHE, MEMORY, footprint
from trilemma.models.tape import Tape
from trilemma.models.types import Buffers, Model


@dataclass(frozen=True)
class Score:
    """How models do: mean `loss`, `accuracy`, number `correct` and number of `examples`.

    Scalars for one model on one data set; (k,) as soon as models or data are per client. Without weights
    accuracy is correct/examples; with weights loss and accuracy are weighted means and padding (weight 0) is
    not counted.
    """

    loss: Tensor
    accuracy: Tensor
    correct: Tensor
    examples: Tensor


@torch.no_grad()
def evaluate(
    model: Model,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    *,
    chunk: int | None = None,
    buffers: Buffers | None = None,
) -> Score:
    """Score parameters (d,) or (k, d) on shared data, y (n,), or per-client data, y (k, n).

    `chunk` bounds how many examples, over all clients, go through the model at a time; by default as many as
    run fastest. Models with batch normalisation use their running statistics, `buffers`.

    >>> from trilemma import models
    >>> from trilemma.keys import Key
    >>> model = models.build("logistic", (68,), 2)
    >>> score = evaluate(model, torch.zeros(4, 69), torch.ones(10, 68), torch.zeros(10).long())
    >>> score.accuracy, score.correct.tolist(), f"{score.loss[0]:.4f}"
    (tensor([1., 1., 1., 1.]), [10, 10, 10, 10], '0.6931')
    """
    if (
        y.dim() not in (1, 2)
        or x.shape[: y.dim()] != y.shape
        or (weight is not None and weight.shape != y.shape)
    ):
        raise UserError(
            "give features (n, …) and labels (n,), or (k, n, …) and (k, n) per client, weights like labels; "
            f"got {tuple(x.shape)}, {tuple(y.shape)}, {None if weight is None else tuple(weight.shape)}"
        )
    if model.buffers and buffers is None:
        raise UserError(f"{model.name!r} is evaluated with its running statistics: pass buffers")
    own = unflatten(model, params.detach())
    clients = next((t.shape[0] for t, axes in ((params, 2), (y, 2)) if t.dim() == axes), None)
    if params.dim() == y.dim() == 2 and params.shape[0] != y.shape[0]:
        raise UserError(f"{params.shape[0]} models for the data of {y.shape[0]} clients: give one each")
    lead = () if clients is None else (clients,)
    tape = Tape(buffers=buffers or {})
    if chunk is None:
        chunk = (MEMORY if x.is_cuda else CACHE) // footprint(model, tuple(x.shape[y.dim() :]))
    step = max(1, chunk // (clients or 1))
    loss = torch.zeros(lead, dtype=torch.float64, device=y.device)
    hits = torch.zeros_like(loss)
    correct = torch.zeros(lead, dtype=torch.int64, device=y.device)
    for start in range(0, y.shape[-1], step):
        part = slice(start, start + step)
        features, labels = (x[:, part], y[:, part]) if y.dim() == 2 else (x[part], y[part])
        if clients is not None and y.dim() == 1:
            features = features.expand(clients, *features.shape)
            labels = labels.expand(clients, *labels.shape)
        logits = model.forward(own, features, tape)
        losses, right = model.loss(logits, labels), model.predict(logits) == labels
        if weight is None:
            loss += losses.sum(-1)
            hits += right.sum(-1)
            correct += right.sum(-1)
        else:
            share = weight[..., part]
            loss += (losses * share).sum(-1)
            hits += (right * share).sum(-1)
            correct += (right & (share > 0)).sum(-1)
    if weight is None:
        total = torch.full(lead, y.shape[-1], dtype=torch.int64, device=y.device)
        mass: Tensor = total
    else:
        total = (weight > 0).sum(-1).expand(lead)
        mass = weight.double().sum(-1)
    return Score((loss / mass).float(), (hits / mass).float(), correct, total)
