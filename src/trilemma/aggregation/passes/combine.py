"""The second pass of a geometric rule: Σ w_i x_i over the rows that have weight."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation.passes import blocks
from trilemma.aggregation.steps.types import Array, Numpy


def weighted_sum(X: Tensor, weights: Array) -> Tensor:
    """Return Σ weights_i x_i (d,) in X's dtype, summed in float64 and rounded once.

    Rows of weight zero are not read: they may hold anything.

    >>> X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [torch.nan, torch.inf]])
    >>> weighted_sum(X, np.array([0.5, 0.5, 0.0]))
    tensor([2., 3.])
    """
    rows = np.flatnonzero(weights)
    used = weights[rows]
    if len(rows) == 1 and used[0] == 1.0:
        return X[int(rows[0])].clone()
    if X.is_cuda:
        from trilemma.aggregation.kernels import cuda

        return cuda.weighted_sum(X, rows, used)
    kernels = blocks.compiled("cpu") if X.numel() > blocks.SMALL else None
    if kernels is None:
        return plain_weighted_sum(X, rows, used)
    kind = torch.float64 if X.dtype == torch.float64 else torch.float32
    out = torch.empty(X.shape[1], dtype=kind, device="cpu")
    target = out.numpy()

    def span(lo: int, hi: int) -> None:
        array, a, b = blocks.window(X, lo, hi)
        kernels.weighted_sum(array, rows, used, a, b, target[lo - a :])

    blocks.over_spans(span, X.shape[1], copies=not blocks.in_place(X))
    return out.to(X.dtype)


def plain_weighted_sum(X: Tensor, rows: Numpy, used: Array) -> Tensor:
    """The same in plain torch operations."""
    index = torch.from_numpy(rows).to(X.device)
    weights = torch.from_numpy(used).to(X.device)
    spans = blocks.spans(X.shape[1], blocks.WIDE_SPAN if X.is_cuda else blocks.SPAN)
    parts = [weights @ X[index, lo:hi].to(torch.float64) for lo, hi in spans]
    return torch.cat([part.to(X.dtype) for part in parts]) if parts else X.new_zeros(0)
