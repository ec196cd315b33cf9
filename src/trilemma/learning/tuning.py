"""Going on from the clients' model, on examples in which liars have no say.

Federated training leaves the model at θ = θ_0 + m; m carries privacy noise, and whatever liars hid in it.
Examples that are public, or that do not leave their owner, cost no privacy. So the server may go on from
there on a root set, a few public examples, and every client on its own, at home:

    θ' = argmin  loss(θ') + (pull/2) ‖θ' − (θ_0 + scale · m)‖²

For Gaussian noise that is the most probable model. `scale` makes up for clipped contributions, which are
shorter than the best move; scale = 0 forgets the clients. Both are chosen on the examples themselves: every
fifth of them is held out once, and of all choices whose held-out loss is within one standard error of the
least, the one that leans least on the clients is taken (Breiman, Friedman, Olshen and Stone 1984); they are
forgotten only where that is best. The loss is that of the best multiple of the outputs, so that confidence
does not count. A lie survives as far as the examples do not show it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilemma import models
from trilemma.data.types import Batch, each
from trilemma.errors import ConfigError
from trilemma.keys import Key
from trilemma.learning.protocol import Algorithm, Clients
from trilemma.models.types import Model

SCALES = (0.0, 1.0, 2.0, 4.0, 8.0)
PULLS = (0.01, 0.03, 0.1, 0.3, 1.0)
PARTS = 5
"""Parts of the examples, of which each is held out once."""

MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Multiples of a classifier's outputs that are tried for the least loss."""

STEPS = 40
"""Steps of L-BFGS at most."""


@dataclass(frozen=True)
class Tuned:
    """A model that went on from where clients left it: its parameters, and how they were found."""

    params: Tensor
    scale: float
    pull: float
    """Of `SCALES` and `PULLS`, as the examples chose."""


def check_going_on(model: Model, examples: int) -> None:
    """Refuse a model, or so few examples of whoever has fewest, from which nobody can go on."""
    if model.buffers:
        raise ConfigError("[aggregation] tune: a model with running statistics cannot go on on few examples")
    if examples < 2:
        raise ConfigError(
            "[aggregation] tune: whoever goes on learning keeps some examples to choose by, and one client "
            f"holds {examples}; allowed: 2 or more for everybody, or tune = 'no'"
        )


def check_one_model(personal: bool, algorithm: str) -> None:
    """Refuse an algorithm whose clients end with models of their own: there is none of all to go on from."""
    if personal:
        raise ConfigError(
            f"[aggregation] tune: it goes on from one model of all, and clients of {algorithm} have their "
            "own already; allowed: tune = 'no', or an algorithm with one model"
        )


def origin_of(algorithm: Algorithm, model: Model, key: Key) -> Tensor:
    """Return θ_0 (d,), from which the run with this key started."""
    return algorithm.init(model, (0,), key.fold("init")).broadcast["params"]


def scales_of(tune: str) -> Sequence[float]:
    """Return which multiples of the clients' move are tried: `[aggregation] tune` may say that they are none.

    >>> scales_of("clients-alone"), scales_of("clients")
    ((0.0,), (0.0, 1.0, 2.0, 4.0, 8.0))
    """
    return (0.0,) if tune in ("alone", "clients-alone") else SCALES


def tuned(owner: Clients, origin: Tensor, model: Tensor, scales: Sequence[float] = SCALES) -> Tuned:
    """Return where one client, or the root set, goes from θ_0 = `origin` and θ = `model`, both (d,)."""
    whole = owner.everything()
    examples = whole.y.shape[1]
    check_going_on(owner.model, examples)

    def losses(scale: float, pull: float) -> Tensor:
        """Return the loss of every example (b,) by the model that was not shown it."""
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
    """Return where one goes whose choices are made: from θ_0 + scale · m on all examples, pulled back."""
    start = start_of(origin, model, scale)
    return Tuned(_nearest(owner, start[None], owner.everything(), pull)[0], scale, pull)


def held_out(owner: Clients, start: Tensor, pull: float | None) -> tuple[Tensor, Tensor]:
    """Return outputs (b, …) for the owner's examples, in parts, and their labels (b, …).

    Every part's are those of the model that goes on from `start` (d,), pulled back to it, on all the others;
    with no pull at all, None, those of `start` itself.
    """
    whole = owner.everything()
    examples = whole.y.shape[1]
    parts = torch.arange(examples, device=whole.y.device) % min(PARTS, examples)
    held = torch.stack([parts == part for part in range(int(parts.max()) + 1)])
    found = start.expand(len(held), -1)
    if pull is not None:
        found = _nearest(owner, found, _weighted(whole, ~held), pull)
    outputs = [
        models.outputs(owner.model, params, each(whole.x, lambda column, rows=rows: column[0][rows]))  # type: ignore[misc]
        for params, rows in zip(found, held, strict=True)
    ]
    return torch.cat(outputs), torch.cat([whole.y[0][rows] for rows in held])


def unseen(owner: Clients, found: Tuned, gradient: Tensor) -> Tensor:
    """Return the change of the clients' model (d,) that raises a loss most after tuning.

    `gradient` is that loss's at the tuned model. A change δ moves that by pull · (H + pull)⁻¹ δ, H the second
    derivative of the loss on the owner's examples: what these show, they take back. Conjugate gradients, with
    differences of gradients for H.
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
        if not float(way @ bent) > 0:  # a network's loss may curve down there: as far as it was solved
            return found.pull * (solution if solution.any() else gradient)
        step = left / float(way @ bent)
        solution, rest = solution + step * way, rest - step * bent
        before, left = left, float(rest @ rest)
        way = rest + left / before * way
    return found.pull * solution


def start_of(origin: Tensor, model: Tensor, scale: float) -> Tensor:
    """Return θ_0 + scale · m; nothing of a model that is forgotten counts, not even that it is no number."""
    return origin + scale * (model - origin) if scale else origin


def _weighted(whole: Batch, rows: Tensor) -> Batch:
    """Return a batch for every row of `rows` (k, b), bool: the mean loss over the examples it names."""

    def repeated(column: Tensor) -> Tensor:
        return column.expand(len(rows), *column.shape[1:])

    weight = rows.float() / rows.sum(1, keepdim=True)
    return replace(whole, x=each(whole.x, repeated), y=repeated(whole.y), weight=weight)


def _nearest(owner: Clients, start: Tensor, batch: Batch, pull: float) -> Tensor:
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
