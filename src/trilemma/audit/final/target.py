"""The model that is attacked, and what an attacker may have been given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from trilemma import models
from trilemma.audit.final.found import CONFIDENCE
from trilemma.base.keys import Key
from trilemma.data.types import Features, each
from trilemma.models.types import Buffers, Model

MOST = 2000
"""Members, and others, that are attacked at most."""


@dataclass(frozen=True)
class AskedRecords:
    """AskedRecords and what is asked about them."""

    x: Features
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def some(self, rows: Sequence[int] | np.ndarray | Tensor) -> AskedRecords:
        """Return these of them."""
        which = torch.as_tensor(rows, dtype=torch.long)
        return AskedRecords(each(self.x, lambda column: column[which]), self.y[which])

    def drawn(self, count: int, key: Key) -> AskedRecords:
        """Return so many of them, drawn; all where there are no more."""
        if len(self) <= count:
            return self
        return self.some(key.numpy().choice(len(self), count, replace=False))


@dataclass(frozen=True)
class FinalModel:
    """A final model under attack.

    `members` were trained on, `others` were not and are like them; None where nobody may have them. `epsilon`
    is what is certified for one record of the members, None: nothing.
    """

    model: Model
    params: Tensor
    digest: str
    members: AskedRecords | None
    others: AskedRecords | None
    epsilon: float | None
    delta: float
    promise: str
    classes: int | None = None
    buffers: Buffers = field(default_factory=dict)

    def outputs(self, x: Features, params: Tensor | None = None) -> Tensor:
        """Return what the model, or another of its kind, makes of examples."""
        one = {name: part[None] for name, part in self.buffers.items()}
        return models.outputs(self.model, self.params if params is None else params, x, buffers=one or None)

    def losses(self, asked: AskedRecords, params: Tensor | None = None) -> np.ndarray:
        """Return the loss of every example (n,), float64."""
        found = self.model.loss(self.outputs(asked.x, params)[None], asked.y[None])[0]
        return np.asarray(found.detach().double().reshape(len(asked), -1).mean(1).cpu())


def at_least(right: int, of: int, risk: float = 1 - CONFIDENCE) -> float:
    """Return what a share surely is at least, by Clopper and Pearson (1934).

    >>> at_least(0, 10), round(at_least(90, 100), 2), at_least(10, 10, 0.5) < 1
    (0.0, 0.81, True)
    """
    return 0.0 if right == 0 else float(beta.ppf(risk, right, of - right + 1))


def at_most(right: int, of: int, risk: float = 1 - CONFIDENCE) -> float:
    """Return what a share surely is at most."""
    return 1 - at_least(of - right, of, risk)
