"""Bulyan: repeated Krum, then values near the median.

Select θ = n − 2f messages: Krum's choice, θ times, each time among those not yet selected. Then, in each
coordinate, average the β = θ − 2f = n − 4f values nearest to the median of the selected ones.

The selection is a mixing step (a matrix of zeros and ones) and the second stage a window of sorted values, so
Bulyan is a chain of the two.

Reference: El Mhamdi, Guerraoui, Rouault, "The hidden vulnerability of distributed learning in Byzantium",
ICML 2018.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trilemma.aggregation.krum import scores
from trilemma.aggregation.passes.columns import Window
from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.chain import Mixing, Staged
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Coordinate, Rule
from trilemma.aggregation.steps.types import Array
from trilemma.base.errors import UserError
from trilemma.base.keys import Key


class RepeatedKrum(Mixing):
    """The first stage: keep the n − 2f messages that Krum selects one after another."""

    label: ClassVar[str] = "bulyan"

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return one row per selected message."""
        pool, chosen = np.arange(geometry.n), []
        for _ in range(geometry.n - 2 * f):
            # To the letter: with f = 1 the last choice has no neighbours left to count, and the first wins.
            count = max(len(pool) - f - 2, 0)
            best = int(np.argmin(scores(geometry.distances[np.ix_(pool, pool)], count)))
            chosen.append(pool[best])
            pool = np.delete(pool, best)
        return np.eye(geometry.n)[sorted(chosen)]

    def count(self, n: int) -> int:
        """Return n − 2f."""
        return n - 2 * self.f


class NearMedian(Coordinate):
    """The second stage: of θ = n − 2f values the θ − 2f nearest to their median."""

    label: ClassVar[str] = "bulyan"

    def window(self, n: int, f: int) -> Window:
        """Return the n − 2f of n values nearest to the median."""
        return Window(n - 2 * f, around_median=True)

    def kappa(self, n: int) -> float | None:
        """Return 0 without Byzantine clients, else None."""
        return 0.0 if self.f == 0 else None


@rules.register("bulyan")
class Bulyan(Staged):
    """Mean around the median, by coordinate, of the n − 2f messages that repeated Krum selects.

    Needs n > 4f. No κ is stated here for f > 0. Cost: two reads of X, n − 2f Krum selections in the n×n
    distances, and a sorting network in cache.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.bulyan(f=1)(torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [99.0]])).value
    tensor([3.])
    """

    def stages(self) -> tuple[tuple[Mixing, ...], Rule]:
        """Return the selection and the mean around the median."""
        return (RepeatedKrum(f=self.f),), NearMedian(f=self.f)

    def check(self, n: int) -> None:
        """Raise a `UserError` unless n > 4f."""
        if n <= 4 * self.f:
            raise UserError(f"bulyan needs n > 4f (its guarantee n ≥ 4f + 3); got f = {self.f}, n = {n}")

    def kappa(self, n: int) -> float | None:
        """Return 0 without Byzantine clients, where this is the mean, else None."""
        self.check(n)
        return 0.0 if self.f == 0 else None
