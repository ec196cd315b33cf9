"""Loss and accuracy of one model, or of one model per client, on shared or per-client data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.models.convolution import reproducible
from trilemma.models.flat import unflatten
from trilemma.models.groups import CACHE, MEMORY, even, footprint
from trilemma.models.tape import Tape
from trilemma.models.types import Buffers, Model


@dataclass(frozen=True)
class Score:
    """How models do: mean `loss`, `accuracy`, number `correct` and number of `examples`.

    Scalars for one model on one data set; (k,) as soon as models, data or running statistics are per client.
    Without weights accuracy is correct/examples; with weights loss and accuracy are weighted means, and
    padding (weight 0) is not counted. Without any example both are NaN.
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
    run fastest. Models with batch normalisation use their running statistics, `buffers`: one set (1, …), or
    one per client.

    >>> from trilemma import models
    >>> model = models.build("logistic", (68,), 2)
    >>> score = evaluate(model, torch.zeros(4, 69), torch.ones(10, 68), torch.zeros(10).long())
    >>> score.accuracy, score.correct.tolist(), f"{score.loss[0]:.4f}"
    (tensor([1., 1., 1., 1.]), [10, 10, 10, 10], '0.6931')
    """
    clients = _clients(model, params, x, y, weight, buffers or {})
    stack = clients or 1
    if chunk is None:
        chunk = (MEMORY if x.is_cuda else CACHE) // footprint(model, tuple(x.shape[y.dim() :]))
    # Every tensor gets a client axis, without copies; a single model is a stack of one.
    features = x if y.dim() == 2 else x.expand(stack, *x.shape)
    labels = y.expand(stack, y.shape[-1])
    share = (torch.ones((), device=y.device) if weight is None else weight).expand(labels.shape)
    theta = params.detach()
    loss, hits = (torch.zeros(stack, dtype=torch.float64, device=y.device) for _ in range(2))
    correct = torch.zeros(stack, dtype=torch.int64, device=y.device)
    within = min(max(1, chunk), y.shape[-1])
    for rows in even(stack, max(1, chunk // max(1, within))):
        own = unflatten(model, theta[rows] if theta.dim() == 2 else theta)
        statistics = {
            name: part.expand(stack, *part.shape[1:])[rows] for name, part in (buffers or {}).items()
        }
        for columns in even(y.shape[-1], max(1, within)):
            part = rows, columns
            with reproducible():
                logits = model.forward(own, features[part], Tape(buffers=statistics))
            right = model.predict(logits) == labels[part]
            loss[rows] += (model.loss(logits, labels[part]) * share[part]).sum(1)
            hits[rows] += (right * share[part]).sum(1)
            correct[rows] += (right & (share[part] > 0)).sum(1)
    mass, examples = share.double().sum(1), (share > 0).sum(1)
    results = (loss / mass).float(), (hits / mass).float(), correct, examples
    return Score(*(result if clients else result[0] for result in results))


def _clients(
    model: Model, params: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, buffers: Buffers
) -> int | None:
    """Refuse what cannot be meant; return the number of clients, None if nothing is per client."""
    shapes = [x.shape[: y.dim()], y.shape if weight is None else weight.shape]
    if y.dim() not in (1, 2) or any(shape != y.shape for shape in shapes):
        raise UserError(
            "give features (n, …) and labels (n,), or (k, n, …) and (k, n) per client, weights like labels; "
            f"got {tuple(x.shape)}, {tuple(y.shape)}, {None if weight is None else tuple(weight.shape)}"
        )
    if set(buffers) != {name for name, _ in model.buffers}:
        names = [name for name, _ in model.buffers]
        raise UserError(f"{model.name!r} is evaluated with its running statistics: pass buffers {names}")
    counts = {
        "models": params.shape[0] if params.dim() == 2 else None,
        "clients with data": y.shape[0] if y.dim() == 2 else None,
        "running statistics": next((len(part) for part in buffers.values() if len(part) > 1), None),
    }
    given = {what: count for what, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        found = ", ".join(f"{count} {what}" for what, count in given.items())
        raise UserError(f"give one of each per client, got {found}")
    return next(iter(given.values()), None)
