"""How good the model, or every client's own model, is on test data; and how fairly that is spread.

With one model and a common test set: loss and accuracy on it. Where clients hold test examples of their own,
or models of their own, honest clients are scored one by one: accuracy is correct answers over examples,
summed over honest clients; fairness is the population variance of their accuracies and the mean of the worst
tenth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trilemma import models
from trilemma.simulate.experiment import Experiment


@dataclass(frozen=True)
class Fairness:
    """How accuracy is spread over honest clients."""

    variance: float
    worst_tenth: float

    @classmethod
    def of(cls, accuracy: Tensor) -> Fairness:
        """Summarise per-client accuracies.

        >>> Fairness.of(Tensor([0.5, 1.0])).worst_tenth
        0.5
        """
        worst = accuracy.sort().values[: math.ceil(len(accuracy) / 10)]
        return cls(float(accuracy.double().var(unbiased=False)), float(worst.mean()))


@dataclass(frozen=True)
class Evaluation:
    """Test loss and accuracy; fairness where clients are scored one by one."""

    loss: float
    accuracy: float
    fairness: Fairness | None = None

    def plain(self) -> dict[str, Any]:
        """Return JSON values."""
        spread = {}
        if self.fairness is not None:
            spread = {"variance": self.fairness.variance, "worst_tenth": self.fairness.worst_tenth}
        return {"loss": _number(self.loss), "accuracy": self.accuracy, **spread}


def evaluate(experiment: Experiment, params: Tensor, buffers: models.Buffers | None = None) -> Evaluation:
    """Score `params`: (d,) for everyone, or (k, d), one row for each client that computes.

    `buffers` are those clients' running statistics, for models that have them.
    """
    clients, federated = experiment.clients, experiment.clients.data
    if params.dim() == 1 and not federated.holdings.test and not buffers:
        x, y = federated.dataset.x_test, federated.dataset.y_test
        score = models.evaluate(clients.model, params, x, y, per_client=False)
        return Evaluation(float(score.loss), float(score.accuracy))

    rows = [row for row, i in enumerate(clients.ids) if i not in experiment.byzantine]
    ids = tuple(clients.ids[row] for row in rows)
    own = params[rows] if params.dim() == 2 else params
    statistics = {name: tensor[rows] for name, tensor in (buffers or {}).items()}
    test = federated.everything(ids, "test")
    score = models.evaluate(clients.model, own, test.x, test.y, test.weight, buffers=statistics or None)
    examples = score.examples.double()
    loss = (score.loss.double() * examples).sum() / examples.sum()
    accuracy = score.correct.sum() / examples.sum()
    return Evaluation(float(loss), float(accuracy), Fairness.of(score.correct / examples))


def _number(value: float) -> float | None:
    """JSON has no word for infinity or not-a-number."""
    return value if math.isfinite(value) else None
