"""Columns of records, as a survey of them counts: cells, bounds, and into which cell a value falls.

Everything here is public and stated without anybody's data. A value falls into exactly one cell of its
column, whatever it is, and no other record has a say in which: so one record changes one cell's count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from trilemma.base.options import Options
from trilemma.data.own.recordwise import fill

Array = NDArray[np.float64]

WIDE = tuple(
    [-(2.0 ** (k / 2)) for k in range(48, -17, -1)] + [0.0] + [2.0 ** (k / 2) for k in range(-16, 49)]
)
"""Edges where no bounds are known: half octaves from 2⁻⁸ to 2²⁴, on both sides of zero."""


class SurveyColumn(Options):
    """One column: numbers between bounds, categories, or numbers whose bounds are to be found."""

    low: float | None = Field(default=None, description="the least value that is told apart (public)")
    high: float | None = Field(default=None, description="the largest")
    bins: int = Field(default=16, ge=2, le=4096, description="cells of equal width between them")
    edges: tuple[float, ...] | None = Field(
        default=None, min_length=2, description="or the ends of the cells, rising"
    )
    values: tuple[int | float | str, ...] | None = Field(
        default=None, min_length=1, description="or the categories that are counted"
    )
    missing: tuple[int | float | str, ...] = Field(
        default=(), description="further values that stand for a missing one"
    )

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> SurveyColumn:
        bounded = self.low is not None or self.high is not None
        if sum([bounded, self.edges is not None, self.values is not None]) > 1:
            raise ValueError("allowed is one of: low and high; edges; values")
        if bounded and (self.low is None or self.high is None):
            raise ValueError("low and high go together")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low = {self.low:g} is not below high = {self.high:g}")
        if self.edges is not None and any(b <= a for a, b in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError("edges rise, and none is there twice")
        if len(set(self.categories)) < len(self.categories):
            raise ValueError("a category is there twice")
        return self

    @cached_property
    def categories(self) -> tuple[str, ...]:
        """The categories, written alike; none for numbers."""
        return tuple(map(written, self.values or ()))

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """The ends of a column's cells of numbers; none of categories."""
        if self.values is not None:
            return ()
        if self.edges is not None:
            return self.edges
        if self.low is None or self.high is None:
            return WIDE
        return tuple(float(end) for end in np.linspace(self.low, self.high, self.bins + 1))

    @property
    def numeric(self) -> bool:
        """Whether values are numbers."""
        return self.values is None

    @property
    def bounded(self) -> bool:
        """Whether values are numbers whose bounds are public, so that they have a mean."""
        return self.numeric and (self.edges is not None or self.low is not None)

    @property
    def cells(self) -> int:
        """How many cells there are: a missing value, each bin or category, and what is in none of them."""
        return 1 + (len(self.ends) + 1 if self.numeric else len(self.categories) + 1)

    @property
    def labels(self) -> tuple[str, ...]:
        """What the cells are called, in order."""
        if not self.numeric:
            return ("missing", *map(str, self.values or ()), "other")
        bins = [f"{a:g} to {b:g}" for a, b in zip(self.ends, self.ends[1:], strict=False)]
        return ("missing", f"below {self.ends[0]:g}", *bins, f"above {self.ends[-1]:g}")

    def read(self, name: str, records: Sequence[Any]) -> tuple[NDArray[np.int64], Array]:
        """Return the cell of each record, and its number scaled to −1 … 1 within the bounds, 0 if missing.

        >>> SurveyColumn(low=0, high=10, bins=2).read("age", [{"age": "7"}, {"age": "?"}, {"age": 99}, {}])
        (array([3, 0, 4, 0]), array([0.4, 0. , 1. , 0. ]))
        >>> SurveyColumn(values=("a", 1)).read("kind", [{"kind": "1.0"}, {"kind": "a"}, {"kind": "b"}])[0]
        array([2, 1, 3])
        """
        cells, scaled = np.zeros(len(records), np.int64), np.zeros(len(records))
        absent = {written(one) for one in self.missing}
        known = {label: place for place, label in enumerate(self.categories, 1)}
        for row, record in enumerate(records):
            text = _text(name, record)
            if text is None or text in absent:
                continue
            if not self.numeric:
                cells[row] = known.get(text, self.cells - 1)
                continue
            number = _number(text)
            if number is None:
                continue
            cells[row] = 1 + self._bin(number)
            if self.bounded:
                low, high = self.ends[0], self.ends[-1]
                middle, half = (low + high) / 2, (high - low) / 2
                scaled[row] = min(1.0, max(-1.0, (number - middle) / half))
        return cells, scaled

    def _bin(self, number: float) -> int:
        """Return the cell of a number: 0 is below the bounds; the largest bound itself is within."""
        if number == self.ends[-1]:
            return len(self.ends) - 1
        return int(np.searchsorted(self.ends, number, side="right"))


def written(value: Any) -> str:
    """Return a value as text by which equal values are found: 1, 1.0 and "1" are equal.

    >>> written("1"), written(1.0), written(" yes ")
    ('1.0', '1.0', 'yes')
    """
    text = str(value).strip()
    number = _number(text)
    return text if number is None else repr(number + 0.0)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _text(name: str, record: Any) -> str | None:
    """Return a record's value in a column as text; None if it is missing, or not finite, or no such thing.

    Whatever a record is, nothing is raised: a column that cannot be read is missing.
    """
    try:
        found = str(fill({name: record.get(name)}, {name: ""})[name])
        if found.lower().lstrip("+-") in ("", "inf", "infinity", "nan"):
            return None
        return written(found)
    except Exception:  # a value's own code, where it has any
        return None
