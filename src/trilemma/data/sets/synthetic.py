r"""Synthetic(α, β): data whose clients differ in their models (α) and in their inputs (β), made from a key.

For client k of N, with 60 features and 10 classes:

    u_k ~ N(0, α²),  B_k ~ N(0, β²),  v_k ∈ ℝ⁶⁰ with entries N(B_k, 1)
    W_k ∈ ℝ⁶⁰ˣ¹⁰ and b_k ∈ ℝ¹⁰ with entries N(u_k, 1)
    x ~ N(v_k, diag(j^−1.2)),  y = argmax(x W_k + b_k)

The iid variant has v_k = B_k · 1 and one W, b ~ N(0, 1) for all. A client has n = 100 + ⌊LogNormal(4, 2)⌋
points, one draw for all clients or one for each; about 64/16/20 % of them train, validate and test.

References: Li et al., "Federated optimization in heterogeneous networks", MLSys 2020; this form, with
standard deviations α and β, and its split: code of Lin et al., NeurIPS 2022.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from trilemma.base.keys import Key
from trilemma.data.catalogue import DatasetOptions, datasets
from trilemma.data.storage import Storage
from trilemma.data.types import Dataset, Holdings

FEATURES, CLASSES = 60, 10
DEVIATIONS = np.arange(1, FEATURES + 1) ** -0.6
"""Standard deviation of feature j: the square root of j^−1.2."""


@datasets.register("synthetic")
class Synthetic(DatasetOptions):
    """Synthetic(alpha, beta): 60 features, 10 classes, generated; comes with its clients.

    >>> data = Synthetic(clients=3, size=315).load(Key(1), Storage.from_environment())
    >>> [len(rows) for rows in data.natural.train + data.natural.valid + data.natural.test]
    [202, 202, 202, 50, 50, 50, 63, 63, 63]
    """

    usual_partition: ClassVar[str] = "natural"

    alpha: float = Field(default=0.0, ge=0)
    """How much the clients' models differ."""
    beta: float = Field(default=0.0, ge=0)
    """How much the clients' inputs differ."""
    clients: int = Field(default=100, ge=1)
    """Number of clients the data is made for."""
    balance: bool = True
    """All clients have equally many points; otherwise each draws its own number."""
    iid: bool = False
    """One model for all clients."""
    size: int | None = Field(default=None, ge=5)
    """Points per client instead of drawing the number; 315 or 316 gives the published 202 for training."""

    def load(self, key: Key, storage: Storage) -> Dataset:
        """Return the data set with its holdings; a pure function of the options and `key`."""
        rng = key.fold("synthetic").numpy()
        sizes = self._sizes(rng)
        model_shift = rng.normal(0.0, self.alpha, self.clients)
        input_shift = rng.normal(0.0, self.beta, self.clients)
        centres = np.repeat(input_shift[:, None], FEATURES, axis=1)
        if not self.iid:
            centres = centres + rng.normal(size=centres.shape)
        shared = _model(rng, 0.0) if self.iid else None
        features, labels = [], []
        for size, shift, centre in zip(sizes, model_shift, centres, strict=True):
            weights, bias = shared or _model(rng, shift)
            x = centre + DEVIATIONS * rng.normal(size=(size, FEATURES))
            features.append(x.astype(np.float32))
            labels.append(np.argmax(x @ weights + bias, axis=1))
        return self._assemble(features, labels, rng)

    def _sizes(self, rng: np.random.Generator) -> list[int]:
        if self.size is not None:
            return [self.size] * self.clients
        drawn = 100 + np.floor(rng.lognormal(4.0, 2.0, 1 if self.balance else self.clients)).astype(np.int64)
        return [int(size) for size in np.broadcast_to(drawn, self.clients)]

    def _assemble(
        self, features: list[np.ndarray], labels: list[np.ndarray], rng: np.random.Generator
    ) -> Dataset:
        """Shuffle each client's points, split them, and lay all clients end to end."""
        parts = [_split(rng.permutation(len(y))) for y in labels]
        learn = [np.concatenate([train, valid]) for train, valid, _ in parts]
        test = [rows for _, _, rows in parts]
        held = Holdings([], [], _end_to_end(test))
        for own, (train, _, _) in zip(_end_to_end(learn), parts, strict=True):
            held.train.append(own[: len(train)])
            held.valid.append(own[len(train) :])

        def pick(arrays: list[np.ndarray], rows: list[np.ndarray]) -> torch.Tensor:
            chosen = [array[own] for array, own in zip(arrays, rows, strict=True)]
            return torch.from_numpy(np.concatenate(chosen))

        return Dataset(
            name="synthetic",
            x_train=pick(features, learn),
            y_train=pick(labels, learn),
            x_test=pick(features, test),
            y_test=pick(labels, test),
            classes=CLASSES,
            description=f"Synthetic({self.alpha:g}, {self.beta:g}){' iid' if self.iid else ''}, "
            f"{self.clients} clients, {sum(map(len, labels)):,} points",
            natural=held,
        )


def _model(rng: np.random.Generator, shift: float) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(shift, 1.0, (FEATURES, CLASSES)), rng.normal(shift, 1.0, CLASSES)


def _end_to_end(pieces: list[np.ndarray]) -> list[np.ndarray]:
    """Return where each piece lies once all are concatenated."""
    ends = np.cumsum([len(piece) for piece in pieces])
    return [np.arange(end - len(piece), end) for piece, end in zip(pieces, ends, strict=True)]


def _split(order: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut n rows into training, validation and test: n − ⌊.8n⌋ test, ⌊.2⌊.8n⌋⌋ validate."""
    learn = math.floor(0.8 * len(order))
    valid = math.floor(0.2 * learn)
    return order[: learn - valid], order[learn - valid : learn], order[learn:]
