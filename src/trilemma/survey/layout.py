"""A survey as one bounded vector for each record: what the sums of these vectors tell, and how to read them.

A record contributes, each scaled by a public constant,

    one                       how many records there are
    1 in one cell of each     histograms, categories, missing values
    column
    x, 2x² − 1                of every number with bounds, x scaled to −1 … 1: mean and variance
    x y                       of every pair of them: correlations

The constants are such that no record's vector is longer than `LONGEST`, just below the usual clip of 1, which
a private client applies all the same (`models.engines.clipping`). A survey is then a round of training whose
per-example gradient is this vector, and every promise about such a round is one about the survey.

The squared length is divided among the four groups by `SHARES`: noise in a group's sums goes with one over
the root of its share, and with the root of how many of its numbers a record may fill at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilemma.survey.columns import Array, SurveyColumn

LONGEST = 1 - 2.0**-6
"""The length of the longest vector. A clip of 1 on a grid acts from 1 − 2⁻⁷ on."""

SHARES: Mapping[str, float] = {"one": 0.1, "cells": 0.5, "moments": 0.25, "products": 0.15}
"""How the squared length is divided among the groups that a survey has."""


@dataclass(frozen=True)
class Layout:
    """Where each sum of a survey stands in the vector, and by what it is scaled.

    >>> sex = SurveyColumn(values=(0, 1))
    >>> layout = Layout({"age": SurveyColumn(low=0, high=100, bins=4), "sex": sex}, True)
    >>> layout.dim, layout.pairs
    (14, ())
    >>> rows = layout.vectors([{"age": 75, "sex": 1}, {"age": "?"}])
    >>> bool((np.linalg.norm(rows, axis=1) < 1).all())
    True
    """

    columns: Mapping[str, SurveyColumn]
    correlations: bool = False

    @cached_property
    def bounded(self) -> tuple[str, ...]:
        """The columns that have moments."""
        return tuple(name for name, column in self.columns.items() if column.bounded)

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs of columns whose products are summed."""
        return tuple(combinations(self.bounded, 2)) if self.correlations else ()

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Where the cells of each column begin."""
        starts, at = {}, 1
        for name, column in self.columns.items():
            starts[name] = at
            at += column.cells
        return starts

    @cached_property
    def _moments(self) -> int:
        return 1 + sum(column.cells for column in self.columns.values())

    @property
    def dim(self) -> int:
        """How long a vector is."""
        return self._moments + 2 * len(self.bounded) + len(self.pairs)

    @cached_property
    def scale(self) -> Array:
        """By what each number of a record is multiplied, (d,)."""
        filled = {
            "one": 1,
            "cells": len(self.columns),
            "moments": 2 * len(self.bounded),
            "products": len(self.pairs),
        }
        whole = sum(SHARES[group] for group, count in filled.items() if count)
        by = {
            group: LONGEST * math.sqrt(SHARES[group] / whole / count)
            for group, count in filled.items()
            if count
        }
        ends = (1, self._moments - 1, 2 * len(self.bounded), len(self.pairs))
        return np.concatenate(
            [np.full(count, by.get(group, 0.0)) for group, count in zip(filled, ends, strict=True)]
        )

    def vectors(self, records: Sequence[Any]) -> NDArray[np.float32]:
        """Return the vector of each record, (m, d)."""
        rows = np.zeros((len(records), self.dim))
        rows[:, 0] = 1.0
        every = np.arange(len(records))
        scaled = {}
        for name, column in self.columns.items():
            cells, scaled[name] = column.read(name, records)
            rows[every, self.places[name] + cells] = 1.0
        for place, name in enumerate(self.bounded):
            rows[:, self._moments + 2 * place] = scaled[name]
            here = rows[:, self.places[name]] == 0
            rows[:, self._moments + 2 * place + 1] = np.where(here, 2 * scaled[name] ** 2 - 1, 0.0)
        for place, (one, other) in enumerate(self.pairs, self._moments + 2 * len(self.bounded)):
            rows[:, place] = scaled[one] * scaled[other]
        return (rows * self.scale).astype(np.float32)

    def reach(self, direction: Array) -> tuple[float, float]:
        """Return between which ends ⟨u, vector⟩ lies for any record, or none."""
        weights = direction * self.scale
        rest = float(np.abs(weights[self._moments :]).sum())
        low, high = float(weights[0]) - rest, float(weights[0]) + rest
        for name, column in self.columns.items():
            cells = weights[self.places[name] : self.places[name] + column.cells]
            low, high = low + float(cells.min()), high + float(cells.max())
        return min(0.0, low), max(0.0, high)

    # Directions: u with ⟨u, sum of vectors⟩ = the number that is asked for.

    def _direction(self, parts: Mapping[int, float]) -> Array:
        found = np.zeros(self.dim)
        for place, weight in parts.items():
            found[place] = weight / self.scale[place]
        return found

    @cached_property
    def records(self) -> Array:
        """The direction of the number of records."""
        return self._direction({0: 1.0})

    def cell(self, name: str, *cells: int) -> Array:
        """Return the direction of the number of records in some cells of a column."""
        return self._direction({self.places[name] + cell: 1.0 for cell in cells})

    def present(self, name: str) -> Array:
        """Return the direction of the number of records whose value in a column is not missing."""
        return self.records - self.cell(name, 0)

    def moment(self, name: str, power: int) -> Array:
        """Return the direction of the sum of a column's x (power 1) or x² (2)."""
        place = self._moments + 2 * self.bounded.index(name)
        if power == 1:
            return self._direction({place: 1.0})
        return self._direction({place + 1: 0.5}) + self.present(name) / 2

    def product(self, one: str, other: str) -> Array:
        """Return the direction of the sum of two columns' x y."""
        first = self._moments + 2 * len(self.bounded)
        return self._direction({first + self.pairs.index((one, other)): 1.0})
