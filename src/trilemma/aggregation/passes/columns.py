"""The pass of a coordinate-wise rule: in each column, the mean of a window of m sorted values.

The median is the mean of the one or two values in the middle, the trimmed mean that of the n − 2f in the
middle, Meamed that of the n − f values nearest to the median, which are consecutive in sorted order as well.
One kernel therefore does them all: sort a block of columns in cache, take the window, count who was in it.

On the CPU the sort is a network of compare-exchanges (Batcher's odd-even merge sort, Knuth 5.2.2M) that works
on hundreds of columns at once, without the exchanges that no wanted rank depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation.passes import blocks
from trilemma.aggregation.steps.types import Array

WIDTH = 256
"""Columns sorted at once: thirty float32 rows of it, twice, stay in the two inner caches."""


@dataclass(frozen=True)
class Window:
    """Which of the sorted values of a column are averaged: `size` in the middle, or nearest to the median."""

    size: int
    around_median: bool = False


@dataclass(frozen=True)
class WeightQuantile:
    """Which part of the weight of a column, in sorted order, is averaged: from `low` to `high`.

    Rows have a weight each, the `mass`; where `low` is `high` it is the value, or the mean of the two values,
    at that quantile.
    """

    low: float
    high: float
    mass: tuple[float, ...]

    def shares(self, V: Tensor) -> Tensor:
        """Return the share of each row in each column's value (k, c); equal values share by their weights.

        >>> V = torch.tensor([[1.0], [3.0], [2.0]], dtype=torch.float64)
        >>> WeightQuantile(0.5, 0.5, (0.25, 0.25, 0.5)).shares(V)
        tensor([[0.],
                [0.],
                [1.]], dtype=torch.float64)
        """
        mass = torch.tensor(self.mass, dtype=torch.float64, device=V.device)
        S, order = V.sort(dim=0)
        upto = torch.cat([torch.zeros_like(V[:1]), mass[order].cumsum(0)])
        column, values = S.T.contiguous(), V.T.contiguous()
        first = upto.gather(0, torch.searchsorted(column, values).T)
        last = upto.gather(0, torch.searchsorted(column, values, right=True).T)
        return mass[:, None] / (last - first) * (self._covered(last) - self._covered(first))

    def _covered(self, upto: Tensor) -> Tensor:
        """Return which share of the span lies before a cumulative weight."""
        if self.high > self.low:
            return (upto.clamp(self.low, self.high) - self.low) / (self.high - self.low)
        near = 1e-12 * sum(self.mass)  # rounding does not decide between one value and two
        return 0.5 * ((upto > self.low - near).double() + (upto > self.low + near).double())


@dataclass(frozen=True)
class Mixture:
    """Rows are replaced by A X before the column is looked at.

    `reference` is a row near the majority: rows are mixed relative to it, in the precision they have. That is
    right where each row of A averages, sums to one, and differences fit float32; where they do not, it is
    None and mixing is done in float64.
    """

    A: Array
    reference: int | None


@dataclass(frozen=True)
class Columns:
    """The outcome over some columns: the values, and sums over these columns.

    `shares` (k,) adds up each (mixed) row's share in the window, `squares` (n,) the squared distances of the
    rows from the value.
    """

    value: Tensor
    shares: Array
    squares: Array


def window_means(
    X: Tensor, rows: Any, window: Window | WeightQuantile, mixture: Mixture | None = None
) -> Columns:
    """Return the window means of X[rows], or of A X[rows]; one pass.

    >>> X = torch.tensor([[1.0, 5.0], [2.0, 4.0], [9.0, 4.0]])
    >>> out = window_means(X, np.arange(3), Window(1))
    >>> out.value, out.shares.tolist()
    (tensor([2., 4.]), [0.0, 1.5, 0.5])
    """
    if isinstance(window, WeightQuantile):
        return plain_window_means(X, rows, window, mixture)
    if X.is_cuda:
        from trilemma.aggregation.kernels import cuda

        return cuda.window_means(X, rows, window, mixture)
    kernels = blocks.compiled("cpu_windows") if X.numel() > blocks.SMALL else None
    if kernels is None:
        return plain_window_means(X, rows, window, mixture)
    exact = mixture is not None and mixture.reference is None
    dtype = np.float64 if exact or X.dtype == torch.float64 else np.float32
    A = np.zeros((0, 0), dtype) if mixture is None else mixture.A.astype(dtype)
    height = len(rows) if mixture is None else len(mixture.A)
    exchanges = network(height, window)
    kind = torch.float64 if X.dtype == torch.float64 else torch.float32
    out = torch.empty(X.shape[1], dtype=kind, device="cpu")
    target = out.numpy()
    k = -1 if mixture is None or mixture.reference is None else mixture.reference

    def span(lo: int, hi: int) -> tuple[Array, Array]:
        array, a, b = blocks.window(X, lo, hi)
        shares, squares = np.zeros(height), np.zeros(len(rows))
        m, around = window.size, window.around_median
        kernels.window_means(
            array, rows, k, A, exchanges, m, around, a, b, WIDTH, target[lo - a :], shares, squares
        )
        return shares, squares

    parts = blocks.over_spans(span, X.shape[1], copies=not blocks.in_place(X))
    shares = sum((part[0] for part in parts), np.zeros(height))
    squares = sum((part[1] for part in parts), np.zeros(len(rows)))
    return Columns(out.to(X.dtype), shares / window.size, squares)


def plain_window_means(
    X: Tensor, rows: Any, window: Window | WeightQuantile, mixture: Mixture | None = None
) -> Columns:
    """The same in plain torch operations, on any device."""
    index = torch.as_tensor(rows, device=X.device)
    height = len(rows) if mixture is None else len(mixture.A)
    shares = torch.zeros(height, dtype=torch.float64, device=X.device)
    squares = torch.zeros(len(rows), dtype=torch.float64, device=X.device)
    values = []
    for lo, hi in blocks.spans(X.shape[1], blocks.WIDE_SPAN if X.is_cuda else blocks.SPAN):
        Y = X[index, lo:hi].to(torch.float64)
        V, offset = Y, torch.zeros(hi - lo, dtype=torch.float64, device=X.device)
        if mixture is not None:
            if mixture.reference is not None:
                offset = X[mixture.reference, lo:hi].to(torch.float64)
            Y = Y - offset
            V = torch.as_tensor(mixture.A, device=X.device) @ Y
        if isinstance(window, WeightQuantile):
            share = window.shares(V)
            value = (share * V).sum(0)
        else:
            S = V.sort(dim=0).values
            start = _starts(S, window)
            ranks = torch.arange(height, device=X.device)[:, None]
            kept = (ranks >= start) & (ranks < start + window.size)
            value = torch.where(kept, S / window.size, 0.0).sum(0)
            share = _tie_shares(V, S, start, window.size)
        shares += share.sum(1)
        squares += (Y - value).square().sum(1)
        values.append((value + offset).to(X.dtype))
    value = torch.cat(values) if values else X.new_zeros(0)
    size = 1 if isinstance(window, WeightQuantile) else window.size
    return Columns(value, shares.cpu().numpy() / size, squares.cpu().numpy())


def _starts(S: Tensor, window: Window) -> Tensor:
    """Rank of the first value in the window, per column."""
    height, m = len(S), window.size
    if not window.around_median:
        return torch.full((S.shape[1],), (height - m) // 2, device=S.device)
    centre = 0.5 * S[(height - 1) // 2] + 0.5 * S[height // 2]
    return (0.5 * S[: height - m] + 0.5 * S[m:] < centre).sum(0)


def _tie_shares(V: Tensor, S: Tensor, start: Tensor, m: int) -> Tensor:
    """How much of each place of the window each row fills; equal values share their places equally."""
    below = torch.searchsorted(S.T.contiguous(), V.T.contiguous()).T
    upto = torch.searchsorted(S.T.contiguous(), V.T.contiguous(), right=True).T
    places = torch.minimum(upto, start + m) - torch.maximum(below, start)
    return places.clamp(min=0) / (upto - below)


@functools.lru_cache(maxsize=64)
def network(n: int, window: Window) -> Any:
    """Return the compare-exchanges (c, 2) after which the ranks a window needs are in place.

    >>> len(network(30, Window(24))), len(network(30, Window(2)))
    (178, 150)
    """
    trim = (n - window.size) // 2
    ranks = range(n) if window.around_median else range(max(trim - 1, 0), min(n - trim + 1, n))
    pairs = _pruned(_merge_exchange(n), ranks)
    return np.array(pairs, dtype=np.int64).reshape(len(pairs), 2)


def _merge_exchange(n: int) -> list[tuple[int, int]]:
    pairs = []
    top = 1 << max((n - 1).bit_length() - 1, 0)
    p = top if n > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(n - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return pairs


def _pruned(pairs: list[tuple[int, int]], ranks: Iterable[int]) -> list[tuple[int, int]]:
    needed, kept = set(ranks), []
    for pair in reversed(pairs):
        if needed.intersection(pair):
            needed.update(pair)
            kept.append(pair)
    return kept[::-1]
