"""What a rule decides, and how a decision is carried out on any columns of the messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from trilemma.aggregation.passes import columns, combine
from trilemma.aggregation.passes.columns import Columns, Mixture, WeightQuantile, Window
from trilemma.aggregation.steps.types import Array, Info


@dataclass(frozen=True)
class Selection:
    """What a rule settles on that ends coordinate by coordinate: a window of A X, or of X if A is None."""

    window: Window | WeightQuantile
    A: Array | None


@dataclass(frozen=True)
class Weighted:
    """A decision for fixed weights, the same in every column."""

    weights: Array
    scores: Array
    info: Info

    def apply(self, X: Tensor) -> Tensor:
        """Return the value on these columns."""
        return combine.weighted_sum(X, self.weights)


@dataclass(frozen=True)
class Columnwise:
    """A decision for a window of sorted values in each column of X[rows], or of mixture.A X[rows]."""

    rows: Any
    window: Window | WeightQuantile
    mixture: Mixture | None
    info: Info

    def apply(self, X: Tensor) -> Columns:
        """Return the value on these columns, with sums of shares and squared distances over them."""
        return columns.window_means(X, self.rows, self.window, self.mixture)

    def totals(self, shares: Array, squares: Array, d: int) -> tuple[Array, Array]:
        """Return (weights, scores) of all clients from the sums over all d columns."""
        n = self.info.n
        weights, scores = np.zeros(n), np.full(n, np.inf)
        mean_share = shares / d if d else np.full(len(shares), 1.0 / len(shares))
        weights[self.rows] = mean_share if self.mixture is None else self.mixture.A.T @ mean_share
        scores[self.rows] = np.sqrt(squares)
        return weights, scores


Decision = Weighted | Columnwise
