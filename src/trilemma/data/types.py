"""What the data room hands out: data sets, who holds which examples, and stacked batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key

Features = Any
"""A tensor (examples, …), or a mapping of names to such tensors, for models with several inputs.

`Any` to the type checker: which of the two a data set has, only its model need know.
"""

IGNORED = -100
"""A class label that counts for nothing: the padding of token labels, and torch's own mark for it."""

Augment = Callable[[Tensor, Sequence[Key]], Tensor]
"""(features (k, b, ...), one key per client) -> features of the same shape; applied to training draws."""


@dataclass(frozen=True)
class Dataset:
    """A data set in memory, features already scaled.

    `x_*` are (examples, …), or mappings of names to such tensors: float32 for quantities, int64 for token
    ids. `y_*` are (examples, …): int64 class labels below `classes`, one per example or one per token
    (`IGNORED` where there is none), or float32 for everything else, and then `classes` is None: several
    yes-or-no labels if `multilabel`, any other numbers if not.

    `description` says what was loaded, from where and how it is scaled. `augment` changes training features
    when they are drawn; `natural` says who holds what, for data that comes with its clients. `left_out` (n,)
    are training examples that have their places and count as zero. `names` are those of a table's columns, in
    the order of the matrix `x_*`; none where examples came without names.
    """

    name: str
    x_train: Features
    y_train: Tensor
    x_test: Features
    y_test: Tensor
    classes: int | None
    description: str = ""
    augment: Augment | None = None
    natural: Holdings | None = None
    multilabel: bool = False
    left_out: Tensor | None = None
    names: tuple[str, ...] = ()

    def to(self, device: torch.device | str) -> Dataset:
        """Return the same data set on `device`."""
        return replace(
            self,
            x_train=each(self.x_train, lambda column: column.to(device)),
            y_train=self.y_train.to(device),
            x_test=each(self.x_test, lambda column: column.to(device)),
            y_test=self.y_test.to(device),
        )

    def needs_classes(self, who: str) -> int:
        """Return the number of classes for `who`, which can do nothing without them.

        >>> heights = Dataset("heights", *[torch.zeros(3, 1), torch.zeros(3)] * 2, classes=None)
        >>> heights.needs_classes("label flipping")
        Traceback (most recent call last):
        trilemma.base.errors.UserError: label flipping needs class labels; the targets of heights are other
        numbers
        """
        if self.classes is None:
            raise UserError(f"{who} needs class labels; the targets of {self.name} are other numbers")
        return self.classes

    def class_labels(self, who: str) -> np.ndarray:
        """Return the training labels for `who`, which goes by the one class of each example."""
        self.needs_classes(who)
        if self.y_train.dim() != 1:
            raise UserError(
                f"{who} needs one class per example; {self.name} has labels of shape "
                f"{tuple(self.y_train.shape[1:])} for each"
            )
        return self.y_train.numpy(force=True)


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
    """One batch per client, stacked: `x` is (k, b, …) or a mapping of such tensors, `y` is (k, b, …).

    `weight` (k, b) sums to one per client and tells each example's share in that client's mean loss; None
    means 1/b. Clients with fewer than b examples are padded with weight 0. Poisson draws are the exception:
    their weights are 1/(expected size), a public constant, and sum to one only in expectation.
    """

    x: Features
    y: Tensor
    weight: Tensor | None = None


def each(x: Features, change: Callable[[Tensor], Tensor]) -> Features:
    """Return features with every tensor changed alike.

    >>> each({"ids": torch.arange(3), "mask": torch.ones(3)}, lambda column: column[:1])
    {'ids': tensor([0]), 'mask': tensor([1.])}
    """
    if isinstance(x, Mapping):
        return {name: change(column) for name, column in x.items()}
    return change(x)


def columns_of(x: Features) -> Mapping[str, Tensor]:
    """Return features as a mapping; a single tensor has the empty name.

    >>> [*columns_of(torch.zeros(2))]
    ['']
    """
    return x if isinstance(x, Mapping) else {"": x}
