"""Examples around their holder's own mean, and whitened by its own covariance.

    centred     x ↦ x − m_i                 m_i the mean of client i's training examples
    whitened    x ↦ S_i^−½ (x − m_i)        S_i their covariance, its symmetric root

What all examples have in common tells no class from another, but whatever is wrong in a linear model is
multiplied by it: noise, and what liars hide (docs/frontier.md). Every holder takes the mean of its own
training examples off them, and off its validation and test examples. A test set that is nobody's own loses
its own mean, as anybody's examples do who uses the model. Nothing is sent for it, so that a client's mean is
as protected as the rest of what it trains on. One example moves all others of its client, though: no
guarantee for a single example covers that.

Directions in which examples differ much are levers too, and a linear model needs none of them longer than
others. The symmetric root turns nothing: of all maps that whiten it moves examples least, so that clients
with similar covariances still speak of the same coordinates. Directions in which a holder's examples do not
differ are dropped. It takes several times as many examples as coordinates to know a covariance.

Reference: statistics that stay with their client are those of Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated
learning on non-IID features via local batch normalization", ICLR 2021, without its scales. The root:
Kessy, Lewin, Strimmer, "Optimal whitening and decorrelation", The American Statistician 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.data.types import Dataset, Holdings

FLAT = 1e-6
"""Of the largest variance: directions with less are taken for those in which examples do not differ."""


def centred(dataset: Dataset, holdings: Holdings, whiten: bool = False) -> Dataset:
    """Return the data set with every holder's examples around its mean, whitened where that is asked for.

    >>> x, y = torch.tensor([[1.0], [3.0], [5.0], [9.0]]), torch.zeros(4).long()
    >>> both = Holdings([np.array([0, 1]), np.array([2, 3])], [], [])
    >>> centred(Dataset("numbers", x, y, x, y, 1), both).x_train.flatten().tolist()
    [-1.0, 1.0, -2.0, 2.0]
    >>> centred(Dataset("numbers", x, y, x, y, 1), both, whiten=True).x_train.flatten().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    if not isinstance(dataset.x_train, Tensor) or not dataset.x_train.is_floating_point():
        raise UserError(f"[data] centre: examples of {dataset.name} are no vectors of numbers")
    if whiten and dataset.x_train.ndim != 2:
        raise UserError(f"[data] whiten: examples of {dataset.name} are no vectors (flat = true?)")
    assert isinstance(dataset.x_test, Tensor)
    train, test = dataset.x_train.clone(), dataset.x_test.clone()
    taken = np.zeros(len(train), dtype=bool)
    for client, rows in enumerate(holdings.train):
        if taken[rows].all() and len(rows):  # a Byzantine client that mirrors an honest one
            continue
        if taken[rows].any():
            raise UserError("[data] centre needs clients that share no examples, or all of them")
        taken[rows] = True
        own = _Own.of(dataset.x_train[rows], whiten)
        train[rows] = own(train[rows])
        if holdings.valid:
            train[holdings.valid[client]] = own(train[holdings.valid[client]])
        if holdings.test:
            test[holdings.test[client]] = own(test[holdings.test[client]])
    if not holdings.test:
        test = around_own(test, whiten)
    return replace(dataset, x_train=train, x_test=test)


def around_own(x: Tensor, whiten: bool = False) -> Tensor:
    """Return examples of one holder around their mean, whitened where that is asked for.

    >>> around_own(torch.tensor([[1.0], [5.0]])).flatten().tolist()
    [-2.0, 2.0]
    """
    return _Own.of(x, whiten)(x)


@dataclass(frozen=True)
class _Own:
    """What a holder does to examples: `mean` is that of one example's shape, `root` (k, k) or None."""

    mean: Tensor
    root: Tensor | None

    @classmethod
    def of(cls, x: Tensor, whiten: bool) -> _Own:
        """Return what whoever holds `x` does; nothing without examples."""
        if not len(x):
            return cls(x.new_zeros(x.shape[1:]), None)
        mean = x.mean(0)
        return cls(mean, _root((x - mean).double()).to(x) if whiten else None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the examples as the holder sees them."""
        around = x - self.mean
        return around if self.root is None else around @ self.root


def _root(around: Tensor) -> Tensor:
    """Return S^−½ (k, k) of examples around their mean, 0 where they do not differ."""
    values, vectors = torch.linalg.eigh(around.T @ around / len(around))
    flat = values <= FLAT * values[-1].clamp(min=1e-30)
    root: Tensor = (vectors * values.clamp(min=1e-30).rsqrt().masked_fill(flat, 0.0)) @ vectors.T
    return root
