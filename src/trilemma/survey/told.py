"""What a survey's server was told, and what follows from it: numbers with intervals that hold despite liars.

n sites send x_i = s_i + noise_i, s_i the sums of their records' vectors. Per coordinate the noise of a mean
over h of them has the variance of `privacy.threats.covariance.mean_noise`; u being a direction, ⟨u, mean⟩ has
‖u‖² times that.

**Liars.** k sites were heard, of which f may lie. The mean over the honest ones, whichever h = k − f they
are, lies between the means of the h smallest and of the h largest ⟨u, x_i⟩. More honest ones only average
such means. Nothing is assumed about what liars send: what no b records and no noise make is cut off first.

**Ratios** t = ⟨a, Σ s⟩ / ⟨c, Σ s⟩ (a mean is one, a share is one): t is the ratio of the honest sites'
sums if and only if g_i = ⟨a − t c, s_i⟩ add up to zero over them. So the interval is every t for which

    mean of the h smallest g − zσ_h ‖a − t c‖   ≤ 0 ≤   mean of the h largest g + zσ_h ‖a − t c‖

(Fieller 1954, where nobody lies). It needs no large counts: where noise drowns the denominator, it is all of
the range that a ratio may lie in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from trilemma.base.errors import UserError
from trilemma.privacy.threats.covariance import agreed_graph, mean_noise
from trilemma.privacy.types import NoiseLaw
from trilemma.survey.columns import Array
from trilemma.survey.layout import Layout

LEVEL = 0.95
"""The chance with which each interval holds, over the noise."""

POINTS = 2001
"""Values that are tried for a ratio; an interval's ends are one further, so it is never too short."""

FAR = 6.0
"""An honest message's noise is beyond so many deviations once in 500 million numbers."""

ROUNDING = 1e-5
"""What single precision may take from a sum, of itself."""


def quantile(level: float) -> float:
    """Return z: a normal number is within ±z with this chance."""
    return NormalDist().inv_cdf((1 + level) / 2)


@dataclass(frozen=True)
class ToldFigure:
    """A number that was told, the standard deviation that noise alone gives it, and its interval.

    The figure of the honest sites lies between `low` and `high` with the chance `LEVEL`, whatever the sites
    that may lie have sent. None: nothing is known.
    """

    value: float | None
    noise: float | None
    low: float | None
    high: float | None

    def times(self, factor: float, plus: float = 0.0, noise: float | None = None) -> ToldFigure:
        """Return the figure in another unit; `noise` is its own factor, where that is another one."""
        by = abs(factor) if noise is None else noise

        def of(one: float | None) -> float | None:
            return None if one is None else one * factor + plus

        return ToldFigure(
            of(self.value), None if self.noise is None else self.noise * by, of(self.low), of(self.high)
        )


@dataclass(frozen=True)
class Told:
    """The messages of a survey and the noise in them.

    Attributes:
        layout: What the coordinates are.
        value: What the rule made of the messages, (d,).
        messages: The messages heard, (k, d); None if only their mean may be known (cdp).
        sites: Who sent them.
        weights: What the rule gave each of them.
        clients: How many clients there are, n.
        liars: How many of them may lie, f.
        law: The noise in messages.
        batch: What the messages were divided by: b.
        neighbours: With how many others each client shares noise; None: with all.
    """

    layout: Layout
    value: Array
    messages: Array | None
    sites: tuple[int, ...]
    weights: tuple[float, ...]
    clients: int
    liars: int
    law: NoiseLaw
    batch: int
    neighbours: int | None = None

    def __post_init__(self) -> None:
        if len(self.sites) <= 2 * self.liars:
            raise UserError(
                f"{len(self.sites)} sites were heard, and f = {self.liars} may lie: nothing follows from "
                f"fewer than {2 * self.liars + 1}"
            )

    @cached_property
    def honest(self) -> int:
        """How many of those heard are honest at least: h."""
        return len(self.sites) - self.liars

    @cached_property
    def _rows(self) -> Array:
        rows = self.value[None] if self.messages is None else self.messages
        return np.asarray(rows, dtype=np.float64) * self.batch

    def deviation(self, heard: int) -> float:
        """Return the noise's standard deviation in a coordinate of the mean over some sites."""
        return self.batch * math.sqrt(
            mean_noise(self.law, self.clients, self.clients - heard, self.neighbours)
        )

    @cached_property
    def own_deviation(self) -> float:
        """The noise's standard deviation in a coordinate of the rule's value.

        Of weights w it is the root of σ_ind² ‖w‖² + σ_cor² wᵀLw, L the Laplacian of who shares noise. A rule
        that chooses looks at the noise, too: a median's is that of a mean times √(π/2).
        """
        weights = np.zeros(self.clients)
        weights[: len(self.weights)] = self.weights
        shared = float(weights @ agreed_graph(self.clients, self.neighbours).laplacian @ weights)
        own = float(weights @ weights)
        chosen = math.pi / 2 if self.liars else 1.0
        return self.batch * math.sqrt(chosen * (self.law.sigma_ind**2 * own + self.law.sigma_cor**2 * shared))

    @cached_property
    def single(self) -> float:
        """The noise's standard deviation in a coordinate of one site's message."""
        others = int(agreed_graph(self.clients, self.neighbours).degrees.max())
        return self.batch * math.hypot(self.law.sigma_ind, math.sqrt(others) * self.law.sigma_cor)

    def amounts(self, direction: Array) -> float:
        """Return what the rule's value says of a direction, for all sites together."""
        return float(direction @ self.value) * self.batch * len(self.sites)

    def _of_each(self, direction: Array) -> Array:
        """Return ⟨u, x_i⟩ of each message, cut to what b records and `FAR` deviations of noise reach."""
        numbers = np.asarray(self._rows @ direction)
        if self.messages is None:
            return numbers
        low, high = self.layout.reach(direction)
        noise = FAR * self.single * float(np.linalg.norm(direction))
        return np.clip(numbers, self.batch * low - noise, self.batch * high + noise)

    def _ends(self, numbers: Array) -> tuple[Array, Array]:
        """Return the means of the h smallest and of the h largest along the first axis."""
        if len(numbers) == 1 or not self.liars:
            mean = numbers.mean(0)
            return mean, mean
        ordered = np.sort(numbers, axis=0)
        return ordered[: self.honest].mean(0), ordered[self.liars :].mean(0)

    def total(self, direction: Array, level: float = LEVEL) -> ToldFigure:
        """Return a sum over all sites' records; of liars as if they were like the others."""
        count, length = len(self.sites), float(np.linalg.norm(direction))
        low, high = self._ends(self._of_each(direction))
        spare = quantile(level) * self.deviation(self.honest) * length
        ends = count * (float(low) - spare), count * (float(high) + spare)
        return ToldFigure(
            min(max(self.amounts(direction), ends[0]), ends[1]),
            count * self.own_deviation * length,
            *ends,
        )

    def ratio(
        self, over: Array, under: Array, within: tuple[float, float], level: float = LEVEL
    ) -> ToldFigure:
        """Return one sum over another, which lies `within` a public range."""
        amount = self.amounts(under)
        deviation = len(self.sites) * self.own_deviation
        told = amount > 2 * deviation * float(np.linalg.norm(under)) and amount > 0
        value = min(max(self.amounts(over) / amount, within[0]), within[1]) if told else None
        tried = np.linspace(*within, POINTS)
        if value is not None:
            tried = np.sort(np.append(tried, value))
        low, high = self._ends(self._of_each(over)[:, None] - self._of_each(under)[:, None] * tried)
        square = float(over @ over), float(over @ under), float(under @ under)
        lengths = np.sqrt(np.maximum(0.0, square[0] - 2 * tried * square[1] + tried**2 * square[2]))
        spare = quantile(level) * self.deviation(self.honest) * lengths
        slack = ROUNDING * max(1.0, abs(amount))
        found = np.flatnonzero((low - spare <= slack) & (high + spare >= -slack))
        if not len(found):  # no ratio in the range: of sites that lie, or noise that is far out
            return ToldFigure(value, None, *within)
        first, last = tried[max(0, found[0] - 1)], tried[min(len(tried) - 1, found[-1] + 1)]
        if value is None:
            return ToldFigure(None, None, float(first), float(last))
        value = float(min(max(value, first), last))
        noise = deviation * float(np.linalg.norm(over - value * under)) / amount
        return ToldFigure(value, noise, float(first), float(last))

    def below(self, direction: Array, level: float) -> int:
        """Return −1 if a sum is surely negative, 1 if it is surely positive, else 0."""
        low, high = self._ends(self._of_each(direction))
        spare = quantile(level) * self.deviation(self.honest) * float(np.linalg.norm(direction))
        return -1 if high + spare < 0 else int(low - spare > 0)

    def of_site(self, place: int, direction: Array) -> ToldFigure:
        """Return a sum of one site's own message, with its noise: a liar's is what it says."""
        assert self.messages is not None
        value = float(self._rows[place] @ direction)
        noise = self.single * float(np.linalg.norm(direction))
        spare = quantile(LEVEL) * noise
        return ToldFigure(value, noise, value - spare, value + spare)


def heard(messages: Array, sites: Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    """Leave out the rows of sites that were not heard, or sent what is not finite."""
    finite: list[int] = np.flatnonzero(np.isfinite(messages).all(1)).tolist()
    return messages[finite], tuple(sites[row] for row in finite)
