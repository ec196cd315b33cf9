"""Mixing steps: what may be done to the messages before a rule. Each is a matrix A; X becomes A X."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trilemma.aggregation.passes import many
from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.chain import Mixing
from trilemma.aggregation.steps.registry import mixings
from trilemma.aggregation.steps.rule import Byzantine, Promise
from trilemma.aggregation.steps.types import Array
from trilemma.base.keys import Key


@mixings.register("nnm")
class NearestNeighbours(Mixing):
    """Nearest-neighbour mixing: each message becomes the mean of its n − f nearest, itself included.

    Where clients have weights: of its nearest up to weight 1 − W, the last of them by a fraction.

    Before a rule of coefficient κ (trace or spectral) the chain has κ' = 8f/(n−f) · (κ + 1) in the trace
    criterion. Cost: n² log n beside the geometry.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> out = agg.chain(agg.nnm(f=1), agg.mean(f=1))(torch.tensor([[0.0], [1.0], [2.0], [90.0]]))
    >>> [round(w, 3) for w in out.weights.tolist()]
    [0.25, 0.333, 0.333, 0.083]

    Reference: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan, "Fixing by mixing: a recipe for optimal
    Byzantine ML under heterogeneity", AISTATS 2023.
    """

    weighs: ClassVar[bool] = True

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return 1/(n−f) for the n − f nearest rows of each row."""
        A = np.zeros((geometry.n, geometry.n))
        if geometry.mass is not None:
            near = nearest(geometry.distances, geometry.n)
            liars, everybody = geometry.counted(f)
            mass, honest = geometry.mass[near], everybody - liars
            before = mass.cumsum(axis=1) - mass
            np.put_along_axis(A, near, np.clip(honest - before, 0.0, mass) / honest, axis=1)
            return A
        near = nearest(geometry.distances, geometry.n - f)
        np.put_along_axis(A, near, 1.0 / (geometry.n - f), axis=1)
        return A

    @property
    def matrices(self) -> Callable[[Tensor], Tensor] | None:
        """See `Mixing.matrices`."""
        return None if self.weights else self._matrices

    def _matrices(self, inner: Tensor) -> Tensor:
        count = inner.shape[1] - self.f
        near = many.nearest_first(many.distances(inner)).sort(dim=2, stable=True).indices[:, :, :count]
        return torch.zeros_like(inner).scatter_(2, near, 1.0 / count)

    def kappa(self, after: float, n: int) -> float:
        """Return 8f/(n−f) · (κ + 1)."""
        f, total = self.counted(n)
        return 8 * f / (total - f) * (after + 1)


@mixings.register("bucketing")
class Bucketing(Mixing):
    """Means of random buckets of `size` messages; the last bucket takes what is left over.

    Byzantine messages spoil at most f of the ⌈n/size⌉ buckets, which must be more than 2f for the rule that
    follows. Without a size, it is 2, or 1 where buckets of two would be too few. The order of the rows is
    drawn from the key of the call: `rule(X, key=Key(seed))`; without a key every call draws the same order.

    No κ is stated here: the paper bounds the error in expectation over the draw.

    >>> from trilemma import aggregation as agg
    >>> agg.chain(agg.bucketing(2, f=1), agg.krum(f=1)).name
    'bucketing(size=2)+krum'

    Reference: Karimireddy, He, Jaggi, "Byzantine-robust learning on heterogeneous datasets via bucketing",
    ICLR 2022.
    """

    lacks: ClassVar[frozenset[Promise]] = frozenset({"permutation"})

    f: Byzantine = 0
    size: int | None = Field(
        default=None,
        ge=1,
        description="messages in a bucket; default: 2, or 1 where that leaves too few buckets",
    )

    def bucket_size(self, n: int) -> int:
        """Return how many of n messages go into a bucket."""
        if self.size is not None:
            return self.size
        return 2 if math.ceil(n / 2) > 2 * self.f else 1

    def count(self, n: int) -> int:
        """Return the number of buckets."""
        return math.ceil(n / self.bucket_size(n))

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return the averages over the buckets of a random order of the rows."""
        n, size = geometry.n, self.bucket_size(geometry.n)
        bucket = np.empty(n, dtype=np.int64)
        bucket[key.numpy().permutation(n)] = np.arange(n) // size
        A = np.zeros((math.ceil(n / size), n))
        A[bucket, np.arange(n)] = 1.0
        A /= A.sum(axis=1, keepdims=True)
        return A


@mixings.register("clip")
class Clipping(Mixing):
    """Scale each message longer than `radius` down to it: x_i · min(1, radius/‖x_i‖).

    No κ: clipping moves honest messages too. Cost: n beside the geometry.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.chain(agg.clip(5.0), agg.mean())(torch.tensor([[3.0, 4.0], [30.0, 40.0]])).value
    tensor([3., 4.])
    """

    lacks: ClassVar[frozenset[Promise]] = frozenset({"translation", "scale", "range"})
    weighs: ClassVar[bool] = True

    f: Byzantine = 0
    radius: float = Field(default=1.0, gt=0, description="the longest a message may be")

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return min(1, radius/‖x_i‖) on the diagonal."""
        return np.diag(shrinkage(geometry.norms, self.radius))


@mixings.register("arc")
class Arc(Mixing):
    """Adaptive robust clipping: the ⌊2(f/n)(n−f)⌋ longest messages are clipped to the norm of the next.

    Cost: n log n beside the geometry.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.chain(agg.arc(f=1), agg.mean(f=1))(torch.tensor([[1.0], [1.0], [2.0], [90.0]])).value
    tensor([1.5000])

    Reference: Allouah, Guerraoui, Gupta, Jellouli, Rizk, Stephan, "Adaptive gradient clipping for robust
    federated learning", ICLR 2025.
    """

    lacks: ClassVar[frozenset[Promise]] = frozenset({"translation", "range"})

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return the clipping to the norm that ⌊2(f/n)(n−f)⌋ rows exceed."""
        n = geometry.n
        longest_first = np.sort(geometry.norms)[::-1]
        return np.diag(shrinkage(geometry.norms, float(longest_first[2 * f * (n - f) // n])))


def shrinkage(norms: Array, radius: float) -> Array:
    """Return min(1, radius/norm) for each norm.

    >>> shrinkage(np.array([0.0, 1.0, 4.0]), 2.0)
    array([1. , 1. , 0.5])
    """
    result: Array = np.divide(radius, norms, out=np.ones_like(norms), where=norms > radius)
    return result


def nearest(distances: Array, count: int) -> Any:
    """Return for each row the indices of the `count` nearest rows, itself first; (n, count) int."""
    ranked = distances.copy()
    np.fill_diagonal(ranked, -1.0)  # a row is its own nearest, whichever duplicates it has
    return np.argsort(ranked, axis=1, kind="stable")[:, :count]
