"""The three passes on a CUDA device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trilemma.aggregation import columns, combine, gram
from trilemma.aggregation.columns import Columns, Mixture, Window
from trilemma.aggregation.types import Array, Numpy


def shifted_gram(X: Tensor, k: int, precise: bool) -> Array:
    """Return ⟨x_i − x_k, x_j − x_k⟩ for all rows and the origin, (n+1, n+1) float64."""
    return gram.plain_pass(X, k)


def weighted_sum(X: Tensor, rows: Numpy, used: Array) -> Tensor:
    """Return Σ used_q X[rows_q] (d,)."""
    return combine.plain_weighted_sum(X, rows, used)


def window_means(X: Tensor, rows: Any, window: Window, mixture: Mixture | None) -> Columns:
    """Return the window means of X[rows], or of A X[rows]."""
    return columns.plain_window_means(X, rows, window, mixture)
