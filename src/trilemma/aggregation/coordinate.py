"""Coordinate-wise rules: median and trimmed mean (Yin et al., ICML 2018), Meamed (Xie et al., 2018).

Each is the mean of a window of the n sorted values of a coordinate; `trilemma.aggregation.columns` does the
work in one pass over X. A client's weight is its share in the windows, averaged over coordinates; clients
with equal values at the edge of a window share the place.

The κ are those of Allouah et al. (AISTATS 2023, "Fixing by Mixing"), in the trace criterion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trilemma.aggregation.columns import Window
from trilemma.aggregation.registry import rules
from trilemma.aggregation.rule import Coordinate


@dataclass(frozen=True)
class Median(Coordinate):
    """The median of each coordinate; see `cwmed`."""

    label: ClassVar[str] = "cwmed"

    def window(self, n: int, f: int) -> Window:
        """Return the one or two values in the middle."""
        return Window(2 - n % 2)

    def kappa(self, n: int) -> float:
        """Return 4(1 + f/(n−2f))²."""
        self.check(n)
        return 4 * (1 + self.f / (n - 2 * self.f)) ** 2


@dataclass(frozen=True)
class TrimmedMean(Coordinate):
    """The trimmed mean of each coordinate; see `cwtm`."""

    label: ClassVar[str] = "cwtm"

    def window(self, n: int, f: int) -> Window:
        """Return the n − 2f values in the middle."""
        return Window(n - 2 * f)

    def kappa(self, n: int) -> float:
        """Return 6f/(n−2f) · (1 + f/(n−2f))."""
        self.check(n)
        ratio = self.f / (n - 2 * self.f)
        return 6 * ratio * (1 + ratio)


@dataclass(frozen=True)
class MeanAroundMedian(Coordinate):
    """The mean of the values nearest to the median of each coordinate; see `meamed`."""

    label: ClassVar[str] = "meamed"

    def window(self, n: int, f: int) -> Window:
        """Return the n − f values nearest to the median."""
        return Window(n - f, around_median=True)

    def kappa(self, n: int) -> float | None:
        """Return 0 without Byzantine clients, where this is the mean, else None."""
        self.check(n)
        return 0.0 if self.f == 0 else None


@rules.register("cwmed")
def cwmed(f: int) -> Median:
    """Median of each coordinate; the mean of the two middle values where n is even.

    κ = 4(1 + f/(n−2f))² (trace criterion). Cost: one read of X and a selection network in cache.

    >>> import torch
    >>> cwmed(f=1)(torch.tensor([[1.0, 9.0], [2.0, 8.0], [50.0, -7.0]])).value
    tensor([2., 8.])
    """
    return Median(f)


@rules.register("cwtm")
def cwtm(f: int) -> TrimmedMean:
    """Mean of each coordinate without its f smallest and f largest values.

    κ = 6f/(n−2f) · (1 + f/(n−2f)) (trace criterion). Cost: one read of X and a sorting network in cache.

    >>> import torch
    >>> cwtm(f=1)(torch.tensor([[1.0], [2.0], [4.0], [50.0]])).value
    tensor([3.])
    """
    return TrimmedMean(f)


@rules.register("meamed")
def meamed(f: int) -> MeanAroundMedian:
    """Mean of the n − f values closest to the median, in each coordinate.

    Between two values equally far from the median, the smaller one is taken. No κ is stated here for f > 0.
    Cost: one read of X and a sorting network in cache.

    >>> import torch
    >>> meamed(f=1)(torch.tensor([[1.0], [2.0], [3.0], [50.0]])).value
    tensor([2.])
    """
    return MeanAroundMedian(f)
