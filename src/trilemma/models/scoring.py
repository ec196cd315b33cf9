"""Loss and accuracy of one model, or of one model per client, on shared or per-client data."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.engines.groups import CACHE, MEMORY, even
from trilemma.models.engines.layered import LAYERS
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.flat import unflatten
from trilemma.models.layers.convolution import reproducible
from trilemma.models.types import Buffers, Inputs, Model, each_column


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


@dataclass(frozen=True)
class _Data:
    """Features and labels, with `lead` axes before those of an example."""

    x: Inputs
    y: Tensor
    lead: int


@torch.no_grad()
def evaluate(
    model: Model,
    params: Tensor,
    x: Inputs,
    y: Tensor,
    weight: Tensor | None = None,
    *,
    per_client: bool | None = None,
    chunk: int | None = None,
    buffers: Buffers | None = None,
) -> Score:
    """Score parameters (d,) or (k, d) on shared data, y (n, …), or per-client data, y (k, n, …).

    Which of the two is told by `per_client`, else by the weights, (n,) or (k, n), else by labels (n,) or
    (k, n). Where labels are numbers and not classes there is no accuracy: NaN.

    `chunk` bounds how many examples, over all clients, go through the model at a time; by default as many as
    run fastest. Models with batch normalisation use their running statistics, `buffers`: one set (1, …), or
    one per client.

    >>> from trilemma import models
    >>> model = models.build("logistic", (68,), 2)
    >>> score = evaluate(model, torch.zeros(4, 69), torch.ones(10, 68), torch.zeros(10).long())
    >>> score.accuracy, score.correct.tolist(), f"{score.loss[0]:.4f}"
    (tensor([1., 1., 1., 1.]), [10, 10, 10, 10], '0.6931')
    """
    if per_client is None:
        per_client = y.dim() == 2 if weight is None else weight.dim() == 2
    lead = 2 if per_client else 1
    clients = _clients(model, params, _Data(x, y, lead), weight, buffers or {})
    stack = clients or 1
    if chunk is None:
        chunk = (MEMORY if y.is_cuda else CACHE) // (model.engine or LAYERS).footprint(model, x, lead)
    # Every tensor gets a client axis, without copies; a single model is a stack of one.
    features = x if per_client else each_column(x, lambda part: part.expand(stack, *part.shape))
    labels = y if per_client else y.expand(stack, *y.shape)
    count = labels.shape[1]
    share = (torch.ones((), device=y.device) if weight is None else weight).expand(stack, count)
    theta = params.detach()
    loss, hits = (torch.zeros(stack, dtype=torch.float64, device=y.device) for _ in range(2))
    correct = torch.zeros(stack, dtype=torch.int64, device=y.device)
    within = min(max(1, chunk), count)
    for rows in even(stack, max(1, chunk // max(1, within))):
        own = unflatten(model, theta[rows] if theta.dim() == 2 else theta)
        statistics = {
            name: part.expand(stack, *part.shape[1:])[rows] for name, part in (buffers or {}).items()
        }
        for columns in even(count, max(1, within)):
            part = rows, columns
            mine = each_column(features, itemgetter(part))
            with reproducible():
                logits = model.forward(own, mine, SavedActivations(buffers=statistics))
            right = _right(model.predict(logits), labels[part])
            # What padding loses is not asked: it may have no loss at all.
            lost = torch.where(share[part] > 0, model.loss(logits, labels[part]), 0.0)
            loss[rows] += (lost * share[part]).sum(1)
            hits[rows] += (right * share[part]).sum(1)
            correct[rows] += ((right == 1) & (share[part] > 0)).sum(1)
    mass, examples = share.double().sum(1), (share > 0).sum(1)
    results = (loss / mass).float(), (hits / mass).float(), correct, examples
    return Score(*(result if clients else result[0] for result in results))


@torch.no_grad()
def outputs(
    model: Model, params: Tensor, x: Inputs, *, buffers: Buffers | None = None, chunk: int | None = None
) -> Tensor:
    """Return what one model, parameters (d,), makes of examples (n, …): (n, …), as the model gives it.

    `chunk` and `buffers`, one set (1, …), are as in `evaluate`.

    >>> from trilemma import models
    >>> outputs(models.build("multinomial", (4,), 3), torch.zeros(15), torch.ones(10, 4)).shape
    torch.Size([10, 3])
    """
    count = len(x) if isinstance(x, Tensor) else len(next(iter(x.values())))
    if chunk is None:
        chunk = (MEMORY if params.is_cuda else CACHE) // (model.engine or LAYERS).footprint(model, x, 1)
    named = unflatten(model, params.detach())
    parts = []
    for rows in even(count, min(max(1, chunk), max(1, count))):
        mine = each_column(x, lambda part, rows=rows: part[rows][None])  # type: ignore[misc]
        with reproducible():
            parts.append(model.forward(named, mine, SavedActivations(buffers=buffers or {}))[0])
    return torch.cat(parts)


def _right(predicted: Tensor, labels: Tensor) -> Tensor:
    """Return how much of every example was predicted, (k, n): all or nothing, or the share of its labels.

    Labels below 0 do not count: that is how tokens without one are marked. Of an example that has no other
    nothing is right. Numbers are not right or wrong: NaN.
    """
    if predicted.dim() == labels.dim() + 1 and predicted.shape[-1] == 1:
        predicted = predicted.squeeze(-1)
    if predicted.shape != labels.shape or predicted.is_floating_point():
        return torch.full(labels.shape[:2], torch.nan, device=labels.device)
    if labels.dim() == 2:
        return (predicted == labels).float()
    asked = (labels >= 0).flatten(2)
    return ((predicted == labels).flatten(2) & asked).sum(2) / asked.sum(2).clamp(min=1)


def _clients(
    model: Model, params: Tensor, data: _Data, weight: Tensor | None, buffers: Buffers
) -> int | None:
    """Refuse what cannot be meant; return the number of clients, None if nothing is per client."""
    y, columns = data.y, [data.x] if isinstance(data.x, Tensor) else list(data.x.values())
    lead = y.shape[: data.lead]
    shapes = [*(column.shape[: data.lead] for column in columns), lead if weight is None else weight.shape]
    if len(lead) != data.lead or any(shape != lead for shape in shapes):
        raise UserError(
            "give features and labels (n, …), or (k, n, …) each per client, and weights (n,) or (k, n); "
            f"got {[tuple(column.shape) for column in columns]}, {tuple(y.shape)}, "
            f"{None if weight is None else tuple(weight.shape)}"
        )
    if set(buffers) != {name for name, _ in model.buffers}:
        names = [name for name, _ in model.buffers]
        raise UserError(f"{model.name!r} is evaluated with its running statistics: pass buffers {names}")
    counts = {
        "models": params.shape[0] if params.dim() == 2 else None,
        "clients with data": y.shape[0] if data.lead == 2 else None,
        "running statistics": next((len(part) for part in buffers.values() if len(part) > 1), None),
    }
    given = {what: count for what, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        found = ", ".join(f"{count} {what}" for what, count in given.items())
        raise UserError(f"give one of each per client, got {found}")
    return next(iter(given.values()), None)
