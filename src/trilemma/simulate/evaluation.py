"""Scores of the model, or of every client's own model, on test data, and how fairly they are spread.

One model with a common test set has its loss and metrics there. If clients hold test examples or models of
their own, honest clients are scored one by one. A metric is then the mean over honest clients, weighted by
their number of examples, so that accuracy is the share of correct answers. Fairness is the population
variance of the first metric over clients, and the mean of the worst tenth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trilemma import models
from trilemma.data.types import each
from trilemma.simulate.experiment import Experiment
from trilemma.task import LOWER_IS_BETTER, Learner


@dataclass(frozen=True)
class Fairness:
    """How a score is spread over honest clients."""

    variance: float
    worst_tenth: float

    @classmethod
    def of(cls, scores: Tensor, lower_is_better: bool = False) -> Fairness:
        """Summarise per-client scores.

        >>> Fairness.of(Tensor([0.5, 1.0])).worst_tenth
        0.5
        """
        worst = scores.sort(descending=lower_is_better).values[: math.ceil(len(scores) / 10)]
        return cls(float(scores.double().var(unbiased=False)), float(worst.mean()))


@dataclass(frozen=True)
class Evaluation:
    """Test loss and metrics by name; fairness if clients are scored one by one, else None."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    fairness: Fairness | None = None

    def plain(self) -> dict[str, Any]:
        """Return JSON values."""
        spread = {}
        if self.fairness is not None:
            spread = {"variance": self.fairness.variance, "worst_tenth": self.fairness.worst_tenth}
        return {
            "loss": _number(self.loss),
            **{name: _number(score) for name, score in self.metrics.items()},
            **spread,
        }


def evaluate(experiment: Experiment, params: Tensor, buffers: models.Buffers | None = None) -> Evaluation:
    """Score `params`: (d,) for all clients, or (k, d) with one row for each client that computes.

    `buffers` are these clients' running statistics, for models that have them.
    """
    clients, federated = experiment.clients, experiment.clients.data
    if params.dim() == 1 and not federated.holdings.test and not buffers:
        x, y = federated.dataset.x_test, federated.dataset.y_test
        marked = _fooled(experiment, params, x, y)
        if experiment.learner is not None:
            scores = experiment.learner.score(params, x, y) if len(y) else {"loss": math.nan}
            return _of({**scores, **marked})
        score = models.evaluate(clients.model, params, x, y, per_client=False)
        return Evaluation(float(score.loss), {"accuracy": float(score.accuracy), **marked})

    rows = [row for row, i in enumerate(clients.ids) if i not in experiment.byzantine]
    ids = tuple(clients.ids[row] for row in rows)
    own = params[rows] if params.dim() == 2 else params
    statistics = {name: tensor[rows] for name, tensor in (buffers or {}).items()}
    test = federated.everything(ids, "test")
    marked = _fooled(experiment, own, test.x, test.y, test.weight, statistics or None)
    if experiment.learner is not None:
        found = _one_by_one(experiment.learner, own, test, statistics)
        return replace(found, metrics={**found.metrics, **marked})
    score = models.evaluate(clients.model, own, test.x, test.y, test.weight, buffers=statistics or None)
    examples = score.examples.double()
    loss = (score.loss.double() * examples).sum() / examples.sum()
    accuracy = score.correct.sum() / examples.sum()
    metrics = {"accuracy": float(accuracy), **marked}
    return Evaluation(float(loss), metrics, Fairness.of(score.correct / examples))


def _fooled(
    experiment: Experiment,
    params: Tensor,
    x: models.Inputs,
    y: Tensor,
    weight: Tensor | None = None,
    buffers: models.Buffers | None = None,
) -> dict[str, float]:
    """Return how often a backdoor works, if the attack has one: as the metric `backdoor`.

    It is the share of marked test examples of other classes that models take for the target. Examples are
    shared, y (n,), or every client's own, y (k, n) with weights.
    """
    backdoor = experiment.attack.backdoor
    if backdoor is None:
        return {}
    if not y.numel():
        return {"backdoor": math.nan}
    lead = y.dim()
    marked = each(x, lambda part: backdoor.marked(part, lead))
    other = (y != backdoor.target).float()
    shares = other if weight is None else weight * other
    wanted = torch.full_like(y, backdoor.target)
    model = experiment.clients.model
    score = models.evaluate(model, params, marked, wanted, shares, per_client=lead == 2, buffers=buffers)
    return {"backdoor": float(score.correct.sum() / score.examples.sum())}


def _one_by_one(
    learner: Learner, params: Tensor, test: models.Examples, buffers: models.Buffers
) -> Evaluation:
    """Score every client on its own test examples; clients without any are left out."""
    assert test.weight is not None
    found: list[dict[str, float]] = []
    counts: list[int] = []
    for row, present in enumerate(test.weight > 0):
        if not bool(present.any()):
            continue
        statistics = {name: part[row : row + 1] for name, part in buffers.items()}
        x = each(test.x, lambda column, row=row, present=present: column[row][present])  # type: ignore[misc]
        own = params[row] if params.dim() == 2 else params
        found.append(learner.score(own, x, test.y[row][present], statistics or None))
        counts.append(int(present.sum()))
    if not found:
        return Evaluation(math.nan)
    share = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    scores = {name: torch.tensor([one[name] for one in found], dtype=torch.float64) for name in found[0]}
    first = next(name for name in [*learner.metrics, "loss"])
    return _of(
        {name: float((values * share).sum()) for name, values in scores.items()},
        Fairness.of(scores[first], first in LOWER_IS_BETTER),
    )


def _of(scores: Mapping[str, float], fairness: Fairness | None = None) -> Evaluation:
    metrics = {name: score for name, score in scores.items() if name != "loss"}
    return Evaluation(scores["loss"], metrics, fairness)


def _number(value: float) -> float | None:
    """Return the value, or None if it is not finite, which JSON cannot express."""
    return value if math.isfinite(value) else None
