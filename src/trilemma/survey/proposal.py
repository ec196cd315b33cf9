"""What training needs of the data, proposed from a survey that was paid for: no record is asked again.

* **scale constants** of numbers: centre and spread, the mean and the standard deviation that were told;
* **bounds** of columns whose bounds were to be found: from the 1 % to the 99 % quantile of a histogram of
  half octaves, of the cells that stand out of the noise of all of them;
* **clip**: half the usual length of a scaled record with a 1 for the shift, √(1 + q)/2 for q numbers: the
  length of a logistic regression's first gradients;
* **class weights**: records over (classes × records of the class), so that rare classes count as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trilemma.survey.figures import STANDS_OUT, ColumnFigures, standing
from trilemma.survey.told import Told

TAIL = 0.01


@dataclass(frozen=True)
class ColumnScale:
    """(value − centre) / spread makes a column's numbers alike."""

    centre: float
    spread: float


@dataclass(frozen=True)
class ColumnBounds:
    """Between which numbers a column's values nearly all lie."""

    low: float
    high: float


@dataclass(frozen=True)
class Proposal:
    """What training needs; columns that too little is known of are left out."""

    scales: Mapping[str, ColumnScale] = field(default_factory=dict)
    bounds: Mapping[str, ColumnBounds] = field(default_factory=dict)
    clip: float | None = None
    class_weights: Mapping[str, float] = field(default_factory=dict)


def propose(told: Told, found: tuple[ColumnFigures, ...], label: str | None) -> Proposal:
    """Return what a survey proposes."""
    scales = {one.name: scale for one in found if one.name != label and (scale := _scale(one)) is not None}
    known = told.layout.columns
    unknown = [name for name, column in known.items() if column.numeric and not column.bounded]
    bounds = {name: one for name in unknown if (one := _bounds(told, name)) is not None}
    weights = next((_weights(one) for one in found if one.name == label), {})
    clip = _digits(math.sqrt(1 + len(scales)) / 2) if scales else None
    return Proposal(scales, bounds, clip, weights)


def _digits(number: float) -> float:
    """Return three digits of a number: more would say more than is known.

    >>> _digits(54.0412), _digits(0.0)
    (54.0, 0.0)
    """
    return float(f"{number:.3g}")


def _scale(column: ColumnFigures) -> ColumnScale | None:
    mean, variance = column.mean, column.variance
    if mean is None or variance is None or mean.value is None or not variance.value:
        return None
    if variance.noise is None or variance.value < STANDS_OUT / 2 * variance.noise:
        return None
    return ColumnScale(_digits(mean.value), _digits(math.sqrt(variance.value)))


def _bounds(told: Told, name: str) -> ColumnBounds | None:
    counts, ends = standing(told, name), told.layout.columns[name].ends
    if counts.sum() <= 0:
        return None
    shares = counts.cumsum() / counts.sum()
    # The cell of a share runs from the end before it to its own; the first and last cells have no end.
    first, last = (int(np.searchsorted(shares, share, side="right")) for share in (TAIL, 1 - TAIL))
    return ColumnBounds(ends[max(0, first - 1)], ends[min(len(ends) - 1, last)])


def _weights(column: ColumnFigures) -> dict[str, float]:
    counts = {
        cell.name: cell.count.value
        for cell in column.cells
        if cell.count is not None and cell.count.value and cell.name not in ("missing", "other")
    }
    whole = sum(counts.values())
    return {name: _digits(whole / (len(counts) * count)) for name, count in counts.items()}
