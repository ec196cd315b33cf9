"""A task's model, ready to be trained and scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.models.types import Buffers, Inputs, Model
from trilemma.task.losses import Loss
from trilemma.task.metrics import Metric


@dataclass(frozen=True)
class Learner:
    """A model and how it is scored.

    `coupled` is the loss of a whole batch where it is not a mean over examples; else the model's own is.
    """

    model: Model
    metrics: Mapping[str, Metric]
    coupled: Loss | None = None

    @torch.no_grad()
    def score(self, params: Tensor, x: Inputs, y: Tensor, buffers: Buffers | None = None) -> dict[str, float]:
        """Return the loss and every metric of parameters (d,) on examples (n, …)."""
        return self.judged(models.outputs(self.model, params, x, buffers=buffers), y)

    @torch.no_grad()
    def judged(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return the loss and every metric of outputs (n, …), of one model or of several."""
        if self.coupled is not None:
            loss = float(self.coupled(outputs, y).double().mean())
        else:
            loss = float(self.model.loss(outputs[None], y[None]).double().mean())
        return {
            "loss": loss,
            **{name: _called(name, metric, outputs, y) for name, metric in self.metrics.items()},
        }


def _called(name: str, metric: Metric, outputs: Tensor, y: Tensor) -> float:
    try:
        found: Any = metric(outputs, y)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"metric {name!r} failed: {type(error).__name__}: {error}") from error
    try:
        return float(found)
    except (TypeError, ValueError):
        raise UserError(f"metric {name!r} returned a {type(found).__name__}; it must be one number") from None
