"""Tuning the model after federated training, on examples that liars cannot influence.

Federated training ends at θ = θ_0 + m, where the move m contains privacy noise and whatever liars hid in it.
Training on public examples, or on examples that do not leave their owner, costs no privacy. So the server may
tune the model on a root set, a few public examples, or every client may tune it on its own data:

    θ' = argmin  loss(θ') + (pull/2) ‖θ' − (θ_0 + scale · m)‖²

For Gaussian noise θ' is the most probable model. `scale` makes up for clipping, which shortens m; scale = 0
discards m. Both are chosen by five-fold cross-validation on the same examples. Of all scales whose held-out
loss is within one standard error of the least, the smallest is taken (Breiman, Friedman, Olshen and Stone
1984); scale 0 only if it is the best. The held-out loss is minimised over multiples of the outputs, so that
confidence does not count. What remains of a lie is what these examples do not show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilemma import models
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.data.types import Batch, each
from trilemma.learning.protocol import Algorithm, Clients
from trilemma.models.types import Model

SCALES = (0.0, 1.0, 2.0, 4.0, 8.0)
PULLS = (0.01, 0.03, 0.1, 0.3, 1.0)
PARTS = 5
"""Folds of cross-validation."""

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Multiples of a classifier's outputs that are tried for the least loss."""

STEPS = 40
"""The most steps of L-BFGS, and of conjugate gradients."""


@dataclass(frozen=True)
class Tuned:
    """A tuned model: its parameters (d,), and the scale and pull that were chosen."""

    params: Tensor
    scale: float
    pull: float
    """One of `SCALES` and one of `PULLS`."""


def check_going_on(model: Model, examples: int) -> None:
    """Refuse a model that cannot be tuned, or too few `examples` (of the owner that has fewest)."""
    if model.buffers:
        raise ConfigError("[aggregation] tune: a model with running statistics cannot go on on few examples")
    if examples < 2:
        raise ConfigError(
            "[aggregation] tune: whoever goes on learning keeps some examples to choose by, and one client "
            f"holds {examples}; allowed: 2 or more for everybody, or tune = 'no'"
        )


def check_one_model(personal: bool, algorithm: str) -> None:
    """Refuse an algorithm whose clients end with models of their own: there is no common model to tune."""
    if personal:
        raise ConfigError(
            f"[aggregation] tune: it goes on from one model of all, and clients of {algorithm} have their "
            "own already; allowed: tune = 'no', or an algorithm with one model"
        )


def origin_of(algorithm: Algorithm, model: Model, key: Key) -> Tensor:
    """Return θ_0 (d,), from which the run with this key started."""
    return algorithm.init(model, (0,), key.fold("init")).broadcast["params"]


def scales_of(tune: str) -> Sequence[float]:
    """Return the scales to try; 0 alone if `[aggregation] tune` says that the clients' move is not used.

    >>> scales_of("clients-alone"), scales_of("clients")
    ((0.0,), (0.0, 1.0, 2.0, 4.0, 8.0))
    """
    return (0.0,) if tune in ("alone", "clients-alone") else SCALES


def tuned(owner: Clients, origin: Tensor, model: Tensor, scales: Sequence[float] = SCALES) -> Tuned:
    """Tune the model on one owner's examples, a client's or the root set's.

    θ_0 = `origin` and θ = `model` are (d,); scale and pull are chosen by cross-validation.
    """
    whole = owner.everything()
    examples = whole.y.shape[1]
    check_going_on(owner.model, examples)

    def losses(scale: float, pull: float) -> Tensor:
        """Return the loss of every example (b,) under the model that was trained without it."""
        outputs, labels = held_out(owner, start_of(origin, model, scale), pull)
        multiples = (1.0,) if labels.is_floating_point() else MULTIPLES
        tried = [owner.model.loss(by * outputs[None], labels[None])[0] for by in multiples]
        return min(tried, key=lambda loss: float(loss.mean()))

    scored = {(scale, pull): losses(scale, pull) for scale in scales for pull in PULLS}
    means = {choice: float(loss.mean().nan_to_num(math.inf)) for choice, loss in scored.items()}
    best = min(means, key=lambda choice: means[choice])
    enough = means[best] + float(scored[best].std()) / math.sqrt(examples)
    least = min(scale for scale, pull in means if means[scale, pull] <= enough and (scale or not best[0]))
    scale, pull = min(((least, pull) for pull in PULLS), key=lambda choice: means[choice])
    return going_on(owner, origin, model, scale, pull)


def going_on(owner: Clients, origin: Tensor, model: Tensor, scale: float, pull: float) -> Tuned:
    """Tune the model on all examples of the owner with a given scale and pull."""
    start = start_of(origin, model, scale)
    return Tuned(_minimisers(owner, start[None], owner.everything(), pull)[0], scale, pull)


def held_out(owner: Clients, start: Tensor, pull: float | None) -> tuple[Tensor, Tensor]:
    """Return outputs (b, …) for the owner's held-out examples, fold by fold, and their labels (b, …).

    The outputs of a fold are those of the model tuned from `start` (d,) on all other folds; with `pull` None
    they are those of `start` itself.
    """
    whole = owner.everything()
    examples = whole.y.shape[1]
    parts = torch.arange(examples, device=whole.y.device) % min(PARTS, examples)
    held = torch.stack([parts == part for part in range(int(parts.max()) + 1)])
    found = start.expand(len(held), -1)
    if pull is not None:
        found = _minimisers(owner, found, _weighted(whole, ~held), pull)
    outputs = [
        models.outputs(owner.model, params, each(whole.x, lambda column, rows=rows: column[0][rows]))  # type: ignore[misc]
        for params, rows in zip(found, held, strict=True)
    ]
    return torch.cat(outputs), torch.cat([whole.y[0][rows] for rows in held])


def unseen(owner: Clients, found: Tuned, gradient: Tensor) -> Tensor:
    """Return the direction (d,) in which a change of the clients' model raises a loss most after tuning.

    `gradient` (d,) is the gradient of that loss at the tuned model. A change δ of the clients' model moves
    the tuned one by pull · (H + pull)⁻¹ δ, where H is the second derivative of the loss on the owner's
    examples: tuning takes back what these show. The result is pull · (H + pull)⁻¹ gradient, by conjugate
    gradients, in which differences of gradients stand for products with H.
    """
    whole = owner.everything()

    def curved(vector: Tensor) -> Tensor:
        length = float(torch.linalg.vector_norm(vector))
        small = 1e-2 / max(length, 1e-30)
        ahead, behind = (
            models.gradients(owner.model, found.params + sign * small * vector, whole).value[0]
            for sign in (1.0, -1.0)
        )
        return (ahead - behind) / (2 * small) + found.pull * vector

    solution, rest = torch.zeros_like(gradient), gradient.clone()
    way, left = rest.clone(), float(rest @ rest)
    for _ in range(STEPS):
        if left <= 1e-8 * float(gradient @ gradient):
            break
        bent = curved(way)
        if not float(way @ bent) > 0:  # negative curvature: return what is solved so far
            return found.pull * (solution if solution.any() else gradient)
        step = left / float(way @ bent)
        solution, rest = solution + step * way, rest - step * bent
        before, left = left, float(rest @ rest)
        way = rest + left / before * way
    return found.pull * solution


def start_of(origin: Tensor, model: Tensor, scale: float) -> Tensor:
    """Return θ_0 + scale · m; for scale 0 exactly θ_0, even if the model is not finite."""
    return origin + scale * (model - origin) if scale else origin


def _weighted(whole: Batch, rows: Tensor) -> Batch:
    """Return k stacked batches: batch i has the mean loss over the examples where `rows[i]` (b,) is true."""

    def repeated(column: Tensor) -> Tensor:
        return column.expand(len(rows), *column.shape[1:])

    weight = rows.float() / rows.sum(1, keepdim=True)
    return replace(whole, x=each(whole.x, repeated), y=repeated(whole.y), weight=weight)


def _minimisers(owner: Clients, start: Tensor, batch: Batch, pull: float) -> Tensor:
    """Return the minimisers (k, d) of the losses plus (pull/2)‖θ − start‖², by L-BFGS."""
    params = start.clone().requires_grad_(True)
    steps = torch.optim.LBFGS([params], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> float:
        found = models.gradients(owner.model, params.detach(), batch)
        away = params.detach() - start
        params.grad = found.value + pull * away
        return float((found.loss + pull / 2 * (away * away).sum(1)).sum())

    steps.step(loss)  # type: ignore[no-untyped-call]
    return params.detach()
