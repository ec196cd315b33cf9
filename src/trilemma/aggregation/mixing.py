"""Mixing steps: what may be done to the messages before a rule. Each is a matrix A; X becomes A X."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from trilemma.aggregation.chain import Mixing
from trilemma.aggregation.gram import Geometry
from trilemma.aggregation.registry import mixings
from trilemma.aggregation.types import Array
from trilemma.errors import UserError
from trilemma.keys import Key


@dataclass(frozen=True)
class NearestNeighbours(Mixing):
    """Nearest-neighbour mixing; see `nnm`."""

    label: ClassVar[str] = "nnm"

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return 1/(n−f) for the n − f nearest rows of each row."""
        A = np.zeros((geometry.n, geometry.n))
        near = nearest(geometry.distances, geometry.n - f)
        np.put_along_axis(A, near, 1.0 / (geometry.n - f), axis=1)
        return A

    def kappa(self, after: float, n: int) -> float:
        """Return 8f/(n−f) · (κ + 1)."""
        return 8 * self.f / (n - self.f) * (after + 1)


@dataclass(frozen=True)
class Bucketing(Mixing):
    """Means of random buckets; see `bucketing`."""

    size: int | None = None
    label: ClassVar[str] = "bucketing"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None and (not isinstance(self.size, int) or self.size < 1):
            raise UserError(f"bucketing: size must be a whole number ≥ 1; got {self.size!r}")

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


@dataclass(frozen=True)
class Clip(Mixing):
    """Rows scaled down to a radius; see `clip`."""

    radius: float = 1.0
    label: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.radius, int | float) or not self.radius > 0:
            raise UserError(f"clip: the radius must be a number > 0; got {self.radius!r}")

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return min(1, radius/‖x_i‖) on the diagonal."""
        return np.diag(shrinkage(geometry.norms, self.radius))


@dataclass(frozen=True)
class Arc(Mixing):
    """Adaptive robust clipping; see `arc`."""

    label: ClassVar[str] = "arc"

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return the clipping to the norm that ⌊2(f/n)(n−f)⌋ rows exceed."""
        n = geometry.n
        longest_first = np.sort(geometry.norms)[::-1]
        return np.diag(shrinkage(geometry.norms, float(longest_first[2 * f * (n - f) // n])))


@mixings.register("nnm")
def nnm(f: int) -> NearestNeighbours:
    """Nearest-neighbour mixing: each message becomes the mean of its n − f nearest, itself included.

    Before a rule of coefficient κ (trace or spectral) the chain has κ' = 8f/(n−f) · (κ + 1) in the trace
    criterion (Allouah et al., AISTATS 2023, "Fixing by Mixing"). Cost: n² log n beside the geometry.

    >>> import torch
    >>> from trilemma.aggregation import chain, mean
    >>> out = chain(nnm(f=1), mean(f=1))(torch.tensor([[0.0], [1.0], [2.0], [90.0]]))
    >>> [round(w, 3) for w in out.weights.tolist()]
    [0.25, 0.333, 0.333, 0.083]
    """
    return NearestNeighbours(f)


@mixings.register("bucketing")
def bucketing(size: int | None = None, f: int = 0) -> Bucketing:
    """Means of random buckets of `size` messages; the last bucket takes what is left over.

    Byzantine messages spoil at most f of the ⌈n/size⌉ buckets, which must be more than 2f for the rule that
    follows. Without a size, it is 2, or 1 where buckets of two would be too few. The order of the rows is
    drawn from the key of the call: `rule(X, key=Key(seed))`; without a key every call draws the same order.

    No κ is stated here: Karimireddy, He, Jaggi (ICLR 2022) bound the error in expectation over the draw.

    >>> from trilemma.aggregation import chain, krum
    >>> chain(bucketing(2, f=1), krum(f=1)).name
    'bucketing(size=2)+krum'
    """
    return Bucketing(f, size)


@mixings.register("clip")
def clip(radius: float = 1.0, f: int = 0) -> Clip:
    """Scale each message longer than `radius` down to it: x_i · min(1, radius/‖x_i‖).

    No κ: clipping moves honest messages too. Cost: n beside the geometry.

    >>> import torch
    >>> from trilemma.aggregation import chain, mean
    >>> chain(clip(5.0), mean())(torch.tensor([[3.0, 4.0], [30.0, 40.0]])).value
    tensor([3., 4.])
    """
    return Clip(f, radius)


@mixings.register("arc")
def arc(f: int) -> Arc:
    """Adaptive robust clipping: the ⌊2(f/n)(n−f)⌋ longest messages are clipped to the norm of the next.

    Allouah, Guerraoui, Gupta, Jellouli, Rizk, Stephan (ICLR 2025). Cost: n log n beside the geometry.

    >>> import torch
    >>> from trilemma.aggregation import chain, mean
    >>> chain(arc(f=1), mean(f=1))(torch.tensor([[1.0], [1.0], [2.0], [90.0]])).value
    tensor([1.5000])
    """
    return Arc(f)


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
