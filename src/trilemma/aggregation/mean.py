"""The plain mean, for comparison: exact without Byzantine clients, defenceless with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Byzantine, Geometric
from trilemma.aggregation.steps.types import Weighing


@rules.register("mean")
class Mean(Geometric):
    """Plain average Σ x_i / n, or Σ w_i x_i where clients have weights: no robustness at all.

    f only says how many messages that are not finite may be left out. κ = 0 for f = 0, none else. Cost: two
    reads of X.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.mean()(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).value
    tensor([2., 4.])
    """

    f: Byzantine = 0
    weighs: ClassVar[bool] = True

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return the clients' own weights."""
        return Weighing(geometry.masses / geometry.counted(f)[1])

    @property
    def weights_from_grams(self) -> Callable[[Tensor], Tensor] | None:
        """See `Rule.weights_from_grams`."""
        return None if self.weights else lambda grams: grams.new_full(grams.shape[:2], 1.0 / grams.shape[1])

    def kappa(self, n: int) -> float | None:
        """Return 0 without Byzantine clients, else None."""
        self.check(n)
        return 0.0 if self.f == 0 else None
