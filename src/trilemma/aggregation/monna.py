"""MoNNA, mean of nearest neighbours.

Reference: Farhadkhani, Guerraoui, Gupta, Hoang, Pinot, Stephan, "Robust collaborative learning with linear
gradient overhead", ICML 2023.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trilemma.aggregation.mixing import nearest
from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Geometric, Promise
from trilemma.aggregation.steps.types import Weighing


@rules.register("monna")
class Monna(Geometric):
    """Mean of the n − f messages nearest to the first one, itself included.

    The first message is the pivot: a client that aggregates what it receives puts its own there, which it can
    trust. There is no κ: with a Byzantine pivot nothing holds. If the pivot is not finite, the first finite
    message takes its place. Cost: two reads of X.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.monna(f=1)(torch.tensor([[2.0], [1.0], [99.0]])).value
    tensor([1.5000])
    """

    lacks: ClassVar[frozenset[Promise]] = frozenset({"permutation"})

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return equal weights for the n − f rows nearest to the first."""
        chosen = nearest(geometry.distances, geometry.n - f)[0]
        weights = np.zeros(geometry.n)
        weights[chosen] = 1.0 / len(chosen)
        return Weighing(weights)

    def kappa(self, n: int) -> float | None:
        """Return 0 without Byzantine clients, where this is the mean, else None."""
        self.check(n)
        return 0.0 if self.f == 0 else None
