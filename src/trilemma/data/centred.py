"""Examples around their holder's own mean.

    x ↦ x − m_i        m_i the mean of client i's training examples

What all examples have in common tells no class from another, but whatever is wrong in a linear model is
multiplied by it: noise, and what liars hide (docs/frontier.md). Every holder takes the mean of its own
training examples off them, and off its validation and test examples. A test set that is nobody's own loses
its own mean, as anybody's examples do who uses the model. Nothing is sent for it, so that a client's mean is
as protected as the rest of what it trains on. One example moves all others of its client, though: no
guarantee for a single example covers that.

Reference: statistics that stay with their client are those of Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated
learning on non-IID features via local batch normalization", ICLR 2021, without its scales.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trilemma.data.types import Dataset, Holdings
from trilemma.errors import UserError


def centred(dataset: Dataset, holdings: Holdings) -> Dataset:
    """Return the data set with every holder's examples around its mean.

    >>> x, y = torch.tensor([[1.0], [3.0], [5.0], [9.0]]), torch.zeros(4).long()
    >>> both = Holdings([np.array([0, 1]), np.array([2, 3])], [], [])
    >>> centred(Dataset("numbers", x, y, x, y, 1), both).x_train.flatten().tolist()
    [-1.0, 1.0, -2.0, 2.0]
    """
    if not isinstance(dataset.x_train, Tensor) or not dataset.x_train.is_floating_point():
        raise UserError(f"[data] centre: examples of {dataset.name} are no vectors of numbers")
    assert isinstance(dataset.x_test, Tensor)
    train, test = dataset.x_train.clone(), dataset.x_test.clone()
    taken = np.zeros(len(train), dtype=bool)
    for client, rows in enumerate(holdings.train):
        if taken[rows].all() and len(rows):  # a Byzantine client that mirrors an honest one
            continue
        if taken[rows].any():
            raise UserError("[data] centre needs clients that share no examples, or all of them")
        taken[rows] = True
        mean = dataset.x_train[rows].mean(0) if len(rows) else torch.zeros_like(train[0])
        train[rows] -= mean
        if holdings.valid:
            train[holdings.valid[client]] -= mean
        if holdings.test:
            test[holdings.test[client]] -= mean
    if not holdings.test and len(test):
        test -= test.mean(0)
    return replace(dataset, x_train=train, x_test=test)
