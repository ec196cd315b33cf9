"""Krum and Multi-Krum: the messages with the nearest neighbours.

A message's score is the sum of its squared distances to its n − f − 2 nearest others. Krum returns the
message of least score, Multi-Krum the mean of the n − f messages of least score. The first one wins a tie.

κ of Krum (trace criterion): let k be the choice, N its n − f − 2 nearest others and itself, S any n − f
messages. At least n − 2f − 1 of N are in S, and score(k) ≤ min_{i∈S} score(i) ≤ 2(n−f) tr Cov_S, so that
(n−2f−1) ‖x_k − mean_S‖² ≤ 2 score(k) + 2(n−f) tr Cov_S ≤ 6(n−f) tr Cov_S. (With n − f − 1 nearest others it
would be 6(n−f)/(n−2f) = 6(1 + f/(n−2f)), the form of Allouah et al., AISTATS 2023.)

Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries: Byzantine tolerant
gradient descent", NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation.passes import many
from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Geometric
from trilemma.aggregation.steps.types import Array, Weighing


@rules.register("krum")
class Krum(Geometric):
    """The message nearest to its n − f − 2 nearest neighbours.

    κ = 6(n−f)/(n−2f−1) (trace criterion). Cost: one read of X, then one row of it. `info.objective` is the
    score of the choice.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.krum(f=1)(torch.tensor([[1.0], [2.0], [2.5], [4.0], [99.0]])).value
    tensor([2.])
    """

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return weight one for the message of least score."""
        score = scores(geometry.distances, neighbours(geometry.n, f))
        weights = np.zeros(geometry.n)
        weights[np.argmin(score)] = 1.0
        return Weighing(weights, objective=float(score.min()))

    @property
    def weights_from_grams(self) -> Callable[[Tensor], Tensor]:
        """See `Rule.weights_from_grams`."""
        return partial(_least, self, 1)

    def kappa(self, n: int) -> float | None:
        """Return 6(n−f)/(n−2f−1), or None where too few neighbours count."""
        self.check(n)
        common = neighbours(n, self.f) + 1 - self.f
        return 6 * (n - self.f) / common if common > 0 else None


@rules.register("multikrum")
class MultiKrum(Geometric):
    """Mean of the n − f messages of smallest Krum score.

    No κ is stated here for f > 0. Cost: two reads of X. `info.objective` is the largest score taken.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.multikrum(f=1)(torch.tensor([[1.0], [2.0], [3.0], [4.0], [99.0]])).value
    tensor([2.5000])
    """

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return equal weights for the n − f messages of least score."""
        score = scores(geometry.distances, neighbours(geometry.n, f))
        chosen = np.argsort(score, kind="stable")[: geometry.n - f]
        weights = np.zeros(geometry.n)
        weights[chosen] = 1.0 / len(chosen)
        return Weighing(weights, objective=float(score[chosen].max()))

    @property
    def weights_from_grams(self) -> Callable[[Tensor], Tensor]:
        """See `Rule.weights_from_grams`."""
        return lambda grams: _least(self, grams.shape[1] - self.f, grams)

    def kappa(self, n: int) -> float | None:
        """Return 0 without Byzantine clients, where this is the mean, else None."""
        self.check(n)
        return 0.0 if self.f == 0 else None


def _least(rule: Geometric, chosen: int, grams: Tensor) -> Tensor:
    """Return equal weights for the `chosen` messages of least score, of each of many (B, n, n)."""
    n = grams.shape[1]
    rule.check(n)
    others = many.nearest_first(many.distances(many.recentred(grams))).sort(2).values
    score = others[:, :, 1 : 1 + neighbours(n, rule.f)].sum(2)
    first = score.sort(dim=1, stable=True).indices[:, :chosen]
    return torch.zeros_like(score).scatter_(1, first, 1.0 / chosen)


def neighbours(n: int, f: int) -> int:
    """Return how many nearest others count: n − f − 2, but at least one where there is one.

    >>> neighbours(10, 2), neighbours(3, 1), neighbours(1, 0)
    (6, 1, 0)
    """
    return max(n - f - 2, min(n - 1, 1))


def scores(distances: Array, count: int) -> Array:
    """Return the sum of each row's squared distances to its `count` nearest others.

    >>> scores(np.array([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]]), count=1)
    array([1., 1., 4.])
    """
    others = distances.copy()
    np.fill_diagonal(others, -1.0)  # a row is not its own neighbour, whichever duplicates it has
    result: Array = np.sort(others, axis=1)[:, 1 : 1 + count].sum(axis=1)
    return result
