"""The statistics that a survey tells: every number a `ToldFigure`, with its noise and its interval.

All of it is worked out from what the server was told and public numbers, and costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trilemma.survey.columns import Array, SurveyColumn
from trilemma.survey.layout import Layout
from trilemma.survey.told import LEVEL, Told, ToldFigure

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
STANDS_OUT = 2.0
"""A count is shown if it is so many standard deviations of its noise, and the least asked for."""


@dataclass(frozen=True)
class CountedCell:
    """How many records fall into a cell; None: too few, or too few to be told from noise."""

    name: str
    count: ToldFigure | None


@dataclass(frozen=True)
class Quantile:
    """A quantile of a column; where it is beyond the bounds, an end of its interval is None."""

    share: float
    figure: ToldFigure


@dataclass(frozen=True)
class ColumnFigures:
    """What is known of a column: its records, and what share of them lacks it; then of those that have it.

    `mean` and `variance` are of values cut to the bounds; None for categories and unknown bounds.
    """

    name: str
    records: ToldFigure
    missing: ToldFigure
    cells: tuple[CountedCell, ...]
    mean: ToldFigure | None
    variance: ToldFigure | None
    quantiles: tuple[Quantile, ...]


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation of two columns, a missing value counting as the middle of its bounds."""

    columns: tuple[str, str]
    figure: ToldFigure


def shown(name: str, count: ToldFigure, least: float) -> CountedCell:
    """Return a cell, with its count if that may be shown: the rule looks at the noised count alone."""
    value, noise = count.value or 0.0, count.noise or 0.0
    if value < max(least, STANDS_OUT * noise):
        return CountedCell(name, None)
    return CountedCell(name, ToldFigure(count.value, count.noise, max(0.0, count.low or 0.0), count.high))


def columns(told: Told, least: float) -> Iterator[ColumnFigures]:
    """Yield the figures of every column."""
    layout = told.layout
    for name, column in layout.columns.items():
        present = layout.present(name)
        yield ColumnFigures(
            name,
            told.total(present),
            told.ratio(layout.cell(name, 0), layout.records, (0.0, 1.0)),
            tuple(
                shown(label, told.total(layout.cell(name, cell)), least)
                for cell, label in enumerate(column.labels)
            ),
            _mean(told, name, column) if column.bounded else None,
            _variance(told, name, column) if column.bounded else None,
            tuple(_quantile(told, name, column, share) for share in QUANTILES) if column.numeric else (),
        )


def _middle(column: SurveyColumn) -> tuple[float, float]:
    low, high = column.ends[0], column.ends[-1]
    return (low + high) / 2, (high - low) / 2


def _mean(told: Told, name: str, column: SurveyColumn) -> ToldFigure:
    middle, half = _middle(column)
    found = told.ratio(told.layout.moment(name, 1), told.layout.present(name), (-1.0, 1.0))
    return found.times(half, middle)


@dataclass(frozen=True)
class _Spread:
    """Mean and variance of a scaled column, among the records that `under` counts."""

    centre: float
    off: float
    around: ToldFigure

    @classmethod
    def of(cls, told: Told, name: str, under: Array, level: float) -> _Spread:
        """Take squares around the mean that was told; the true mean is at most `off` from it."""
        layout = told.layout
        mean = told.ratio(layout.moment(name, 1), under, (-1.0, 1.0), level)
        assert mean.low is not None
        assert mean.high is not None
        centre = (mean.low + mean.high) / 2 if mean.value is None else mean.value
        squares = layout.moment(name, 2) - 2 * centre * layout.moment(name, 1) + centre**2 * under
        return cls(
            centre,
            max(centre - mean.low, mean.high - centre),
            told.ratio(squares, under, (0.0, 4.0), level),
        )

    @property
    def variance(self) -> ToldFigure:
        """The variance: squares around another number than the mean are larger by its square distance."""
        low, high = self.around.low or 0.0, self.around.high
        high = 1.0 if high is None else min(1.0, high)
        value = None if self.around.value is None else min(1.0, self.around.value)
        return ToldFigure(value, self.around.noise, max(0.0, low - self.off**2), high)


def _variance(told: Told, name: str, column: SurveyColumn) -> ToldFigure:
    _, half = _middle(column)
    spread = _Spread.of(told, name, told.layout.present(name), 1 - (1 - LEVEL) / 2)
    return spread.variance.times(half**2)


def _quantile(told: Told, name: str, column: SurveyColumn, share: float) -> Quantile:
    """Return a quantile from the cumulated histogram: between which ends it surely lies.

    All ends are looked at, so each is judged at a level that leaves `LEVEL` for all of them together.
    """
    ends = column.ends
    level = 1 - (1 - LEVEL) / len(ends)
    low: float | None = None
    high: float | None = None
    for place, end in enumerate(ends):
        surely = told.below(_under(told.layout, name, place, share), level)
        low = end if surely < 0 else low
        high = end if surely > 0 and high is None else high
    counts = histogram(told, name) if column.bounded else standing(told, name)
    value = _interpolated(counts, ends, share)
    if value is None:
        return Quantile(share, ToldFigure(None, None, low, high))
    value = min(max(value, -math.inf if low is None else low), math.inf if high is None else high)
    return Quantile(share, ToldFigure(value, _noise(told, name, counts, value, share), low, high))


def _under(layout: Layout, name: str, place: int, share: float) -> Array:
    """Return the direction of how many more records are below an end than a share of all.

    It is counted from the side with less noise: all that is not below is above.
    """
    last, present = layout.columns[name].cells, layout.present(name)
    left = layout.cell(name, *range(1, place + 2)) - share * present
    right = (1 - share) * present - layout.cell(name, *range(place + 2, last))
    return left if float(left @ left) <= float(right @ right) else right


def _noise(told: Told, name: str, counts: Array, value: float, share: float) -> float | None:
    """Return the deviation of a quantile: that of the share below it, over how dense records are there."""
    ends = told.layout.columns[name].ends
    place = min(max(int(np.searchsorted(ends, value)), 1), len(ends) - 1)
    dense = counts[place] / (ends[place] - ends[place - 1])
    if dense <= 0:
        return None
    below = told.total(_under(told.layout, name, place, share)).noise
    return None if below is None else below / float(dense)


def standing(told: Told, name: str) -> Array:
    """Return `histogram` with those counts alone that stand out of the noise of all cells together."""
    counts = histogram(told, name)
    noise = told.total(told.layout.cell(name, 1)).noise or 0.0
    return np.asarray(counts * (counts > math.sqrt(2 * math.log(len(counts))) * noise))


def histogram(told: Told, name: str) -> Array:
    """Return the noised counts of a column's cells but that of missing values, none of them negative."""
    layout = told.layout
    cells = range(1, layout.columns[name].cells)
    return np.asarray(np.maximum(0.0, [told.amounts(layout.cell(name, cell)) for cell in cells]))


def _interpolated(counts: Array, ends: tuple[float, ...], share: float) -> float | None:
    """Return a quantile of a histogram, its cells' records spread evenly; None if there are no records."""
    if counts.sum() <= 0:
        return None
    return float(np.interp(share, counts[:-1].cumsum() / counts.sum(), ends))


def correlations(told: Told) -> Iterator[Correlation]:
    """Yield the correlation of every pair of columns."""
    layout, level = told.layout, 1 - (1 - LEVEL) / 5
    spreads = {
        name: _Spread.of(told, name, layout.records, level)
        for name in {one for pair in layout.pairs for one in pair}
    }
    for pair in layout.pairs:
        one, other = (spreads[name] for name in pair)
        products = (
            layout.product(*pair)
            - other.centre * layout.moment(pair[0], 1)
            - one.centre * layout.moment(pair[1], 1)
            + one.centre * other.centre * layout.records
        )
        shared = told.ratio(products, layout.records, (-4.0, 4.0), level)
        yield Correlation(pair, _correlation(shared, one, other))


def _correlation(shared: ToldFigure, one: _Spread, other: _Spread) -> ToldFigure:
    """Return the correlation: a covariance over the root of two variances, each within its interval."""
    off = one.off * other.off
    low, high = (shared.low or 0.0) - off, (shared.high or 0.0) + off
    first, second = one.variance, other.variance
    most = math.sqrt((first.high or 0.0) * (second.high or 0.0))
    fewest = math.sqrt((first.low or 0.0) * (second.low or 0.0))

    def over(covariance: float, positive: float, negative: float) -> float:
        root = positive if covariance > 0 else negative
        if root == 0:
            return math.copysign(1.0, covariance) if covariance else 0.0
        return min(1.0, max(-1.0, covariance / root))

    ends = over(low, most, fewest), over(high, fewest, most)
    root = math.sqrt((first.value or 0.0) * (second.value or 0.0))
    if shared.value is None or not root:
        return ToldFigure(None, None, *ends)
    value = min(max(shared.value / root, ends[0]), ends[1])
    return ToldFigure(value, None if shared.noise is None else shared.noise / root, *ends)
