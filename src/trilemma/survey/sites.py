"""What a survey tells of single sites, where their messages may be seen: their records, how they differ.

The distance of two sites in a column is that of their shares of records in its cells, √Σ (p_c − q_c)²: 0 if
they are alike, √2 if they have nothing in common. Noise alone keeps sites apart, so the square of the
distance that is told is less the expected square of the noise. Under secldp and byzldp a site's own message
has so much noise that little is known of it: that is what these threat models promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from trilemma.survey.columns import Array
from trilemma.survey.figures import CountedCell, shown
from trilemma.survey.told import LEVEL, Told, ToldFigure, quantile

KNOWN = 4.0
"""A site's number of records must be so many standard deviations of its noise for its shares to be told."""

MOST = 32
"""With more sites than that, distances are not told: there are too many pairs to read."""


@dataclass(frozen=True)
class SiteFigures:
    """A site's records, and those with each label, where the survey has a label."""

    site: int
    records: CountedCell
    labels: tuple[CountedCell, ...]


@dataclass(frozen=True)
class Drift:
    """How far two sites are apart in a column."""

    column: str
    sites: tuple[int, int]
    distance: ToldFigure


def sites(told: Told, label: str | None, least: float) -> Iterator[SiteFigures]:
    """Yield what each site's own message says."""
    layout = told.layout
    for place, site in enumerate(told.sites if told.messages is not None else ()):
        cells = layout.columns[label].labels if label else ()
        yield SiteFigures(
            site,
            shown("records", told.of_site(place, layout.records), least),
            tuple(
                shown(name, told.of_site(place, layout.cell(label or "", cell)), least)
                for cell, name in enumerate(cells)
            ),
        )


def drifts(told: Told) -> Iterator[Drift]:
    """Yield the distance of any two sites whose shares can be told, in every column."""
    if told.messages is None or len(told.sites) > MOST:
        return
    layout, rows = told.layout, np.asarray(told.messages, dtype=np.float64) * told.batch
    held = rows @ layout.records
    noise = told.single * float(np.linalg.norm(layout.records))
    known = [place for place in range(len(rows)) if held[place] > max(KNOWN * noise, 0.0)]
    for name, column in layout.columns.items():
        cells = np.stack([layout.cell(name, cell) for cell in range(column.cells)], axis=1)
        shares = (rows @ cells) / np.where(held > 0, held, 1.0)[:, None]
        lengths = np.linalg.norm(cells, axis=0)[0], float(np.linalg.norm(layout.records))
        for one, other in combinations(known, 2):
            pair = _Pair(told, float(held[one]), float(held[other]), shares[one], shares[other], lengths)
            yield Drift(name, (told.sites[one], told.sites[other]), pair.distance)


@dataclass(frozen=True)
class _Pair:
    """Two sites' records and shares; `lengths` are those of the directions of a cell and of the records."""

    told: Told
    one: float
    other: float
    first: Array
    second: Array
    lengths: tuple[float, float]

    @property
    def _variances(self) -> Array:
        """The variance of the noise in each cell's difference, to first order in the noise."""
        cell, records = (length**2 for length in self.lengths)
        shared = (self.told.batch * self.told.law.sigma_cor) ** 2
        own = self.told.single**2
        by = cell + self.first**2 * records, cell + self.second**2 * records
        both = cell + self.first * self.second * records
        return np.asarray(
            own * by[0] / self.one**2
            + own * by[1] / self.other**2
            + 2 * shared * both / (self.one * self.other)  # noise that two sites share has two signs
        )

    @property
    def distance(self) -> ToldFigure:
        """Their distance."""
        variances, apart = self._variances, self.first - self.second
        square = float((apart**2 - variances).sum())
        deviation = math.sqrt(
            float((2 * variances**2 + 4 * np.maximum(apart**2 - variances, 0) * variances).sum())
        )
        spare = quantile(LEVEL) * deviation

        def root(number: float) -> float:
            return min(math.sqrt(2.0), math.sqrt(max(0.0, number)))

        value = root(square)
        noise = deviation / (2 * value) if value > math.sqrt(deviation) else math.sqrt(deviation)
        return ToldFigure(value, noise, root(square - spare), root(square + spare))
