"""What the data room hands out: data sets, who holds which examples, and stacked batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trilemma.keys import Key

Augment = Callable[[Tensor, Sequence[Key]], Tensor]
"""(features (k, b, ...), one key per client) -> features of the same shape; applied to training draws."""


@dataclass(frozen=True)
class Dataset:
    """A classification data set in memory, features already scaled.

    `x_*` are float32 of shape (examples, ...), `y_*` int64 of shape (examples,). `description` says what was
    loaded, from where and how it is scaled. `augment` changes training features when they are drawn;
    `natural` says who holds what, for data that comes with its clients.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    description: str = ""
    augment: Augment | None = None
    natural: Holdings | None = None

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data set on `device`."""
        return replace(
            self,
            x_train=self.x_train.to(device),
            y_train=self.y_train.to(device),
            x_test=self.x_test.to(device),
            y_test=self.y_test.to(device),
        )


@dataclass(frozen=True)
class Holdings:
    """Which examples each client holds: `train[i]` indexes x_train for client i.

    `valid` indexes x_train too, `test` indexes x_test. They are empty lists where a partition gives clients
    no validation or test examples of their own; then everyone is tested on the whole test set.
    """

    train: list[np.ndarray]
    valid: list[np.ndarray]
    test: list[np.ndarray]

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train)


@dataclass(frozen=True)
class Batch:
    """One batch per client, stacked: `x` is (k, b, ...), `y` is (k, b).

    `weight` (k, b) sums to one per client and tells each example's share in that client's mean loss; None
    means 1/b. Clients with fewer than b examples are padded with weight 0. Poisson draws are the exception:
    their weights are 1/(expected size), a public constant, and sum to one only in expectation.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
