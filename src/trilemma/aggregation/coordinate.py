"""Coordinate-wise rules: median, trimmed mean, mean around the median.

Each is the mean of a window of the n sorted values of a coordinate; `trilemma.aggregation.passes.columns`
does the work in one pass over X. A client's weight is its share in the windows, averaged over coordinates;
clients with equal values at the edge of a window share the place. Where clients have weights, the window is
one of weight: a client at its edge is in it by a fraction, and half of the weight lies on either side of the
median.

The κ are those of Allouah et al. (AISTATS 2023, "Fixing by Mixing"), in the trace criterion.
"""

from __future__ import annotations

from typing import ClassVar

from trilemma.aggregation.passes.columns import Window
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Coordinate


@rules.register("cwmed")
class Median(Coordinate):
    """Median of each coordinate; the mean of the two middle values where n is even.

    κ = 4(1 + f/(n−2f))² (trace criterion). Cost: one read of X and a selection network in cache.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.cwmed(f=1)(torch.tensor([[1.0, 9.0], [2.0, 8.0], [50.0, -7.0]])).value
    tensor([2., 8.])

    Reference: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal
    statistical rates", ICML 2018.
    """

    weighs: ClassVar[bool] = True

    def window(self, n: int, f: int) -> Window:
        """Return the one or two values in the middle."""
        return Window(2 - n % 2)

    def span(self, liars: float, everybody: float) -> tuple[float, float]:
        """Return where half of the weight lies on either side."""
        return everybody / 2, everybody / 2

    def kappa(self, n: int) -> float:
        """Return 4(1 + f/(n−2f))²."""
        self.check(n)
        f, total = self.counted(n)
        return 4 * (1 + f / (total - 2 * f)) ** 2


@rules.register("cwtm")
class TrimmedMean(Coordinate):
    """Mean of each coordinate without its f smallest and f largest values.

    κ = 6f/(n−2f) · (1 + f/(n−2f)) (trace criterion). Cost: one read of X and a sorting network in cache.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.cwtm(f=1)(torch.tensor([[1.0], [2.0], [4.0], [50.0]])).value
    tensor([3.])

    Reference: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards optimal
    statistical rates", ICML 2018.
    """

    weighs: ClassVar[bool] = True

    def window(self, n: int, f: int) -> Window:
        """Return the n − 2f values in the middle."""
        return Window(n - 2 * f)

    def span(self, liars: float, everybody: float) -> tuple[float, float]:
        """Return what is left when the liars' weight is cut off at either end."""
        return liars, everybody - liars

    def kappa(self, n: int) -> float:
        """Return 6f/(n−2f) · (1 + f/(n−2f))."""
        self.check(n)
        f, total = self.counted(n)
        ratio = f / (total - 2 * f)
        return 6 * ratio * (1 + ratio)


@rules.register("meamed")
class MeanAroundMedian(Coordinate):
    """Mean of the n − f values closest to the median, in each coordinate.

    Between two values equally far from the median, the smaller one is taken. No κ is stated here for f > 0.
    Cost: one read of X and a sorting network in cache.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.meamed(f=1)(torch.tensor([[1.0], [2.0], [3.0], [50.0]])).value
    tensor([2.])

    Reference: Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD", 2018.
    """

    def window(self, n: int, f: int) -> Window:
        """Return the n − f values nearest to the median."""
        return Window(n - f, around_median=True)

    def kappa(self, n: int) -> float | None:
        """Return 0 without Byzantine clients, where this is the mean, else None."""
        self.check(n)
        return 0.0 if self.f == 0 else None
