"""Whom the evidence proves to lie.

For honest clients i and j, whatever their data and however everybody else behaved, the noise in S_i, and in
S_i/√K_ii ± S_j/√K_jj, is a Gaussian vector of known variance: its squared length is a multiple of χ²_d. What
the data added is no longer than the bounds, so by the triangle inequality

    √v χ_low − b ≤ ‖S‖ ≤ √v χ_high + b,

S a client's own sum or a pair's, v its variance, b its bound. Nothing is assumed about how contributions
depend on noise. A length outside proves a lie: of the client, or of one of the two.

**Who of the two.** Any client can make a pair fail alone, by copying the other's message for instance, so a
failing pair accuses both. Honest clients accuse each other with at most the stated probability; all who
accuse an honest client therefore lie, and are at most as many as there may be liars. So whoever is accused by
more is a liar for certain. Of the pairs then left both clients are set aside: at least one of the two lies.

**Directions.** Along a direction that stands out of everybody's noise (`correction.visible`), be it the
mean's or the liars' own, each member's move ⟨S_i, v⟩/√K_ii is compared with the median: beyond k times the
spread of the middle half (at least 1), plus twice the data's bound, a client is expelled; at most as many as
may lie. This test is for clients whose noise the others do not know: liars who add an honest client's very
noise to their messages can turn the direction towards it, at the price of pushing the model nowhere else
(docs/frontier.md). It is asked only where lengths and pairs are silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import scipy

from trilemma.learning.evidence.correction import Direction, from_the_middle, visible
from trilemma.learning.trace import Array, Law, Places
from trilemma.records import Test

SLACK = 2.0
"""How far honest contributions may lie apart along a direction, in bounds: two, from end to end."""


@dataclass(frozen=True)
class Expulsion:
    """Why a client was expelled: the test, what it gave and what an honest client would not have exceeded.

    `statistic` is a length; beyond `threshold`, or below it where `low`. `others` are the clients whose sums
    with this one's failed.
    """

    client: int
    test: Test
    statistic: float = math.nan
    threshold: float = math.nan
    low: bool = False
    others: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found = asdict(self) | {"others": list(self.others)}
        return {name: None if value != value else value for name, value in found.items()}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Expulsion:
        """Return what `plain` was written from.

        >>> Expulsion.read(Expulsion(3, "pairs", 2.0, 1.0, others=(1, 2)).plain()).others
        (1, 2)
        """
        missing = {name: math.nan for name in ("statistic", "threshold") if plain[name] is None}
        return cls(**{**plain, **missing, "others": tuple(plain["others"])})

    def __str__(self) -> str:
        if self.test == "not finite":
            return "a message that is not finite"
        beside = f", with {len(self.others)} others" if len(self.others) > 1 else ""
        beside = f", with client {self.others[0]}" if len(self.others) == 1 else beside
        return f"{self.test}: {self.statistic:.4g} {'<' if self.low else '>'} {self.threshold:.4g}{beside}"


def clients_of(found: Sequence[Expulsion]) -> Places:
    """Return who is expelled."""
    return np.array([one.client for one in found], dtype=np.int64)


def proved(found: Sequence[Expulsion]) -> float:
    """Return how many liars are proved: of two who were set aside together at least one lied.

    >>> proved([Expulsion(0, "length"), Expulsion(1, "one of a pair"), Expulsion(2, "one of a pair")])
    2.0
    """
    return sum(0.5 if one.test == "one of a pair" else 1.0 for one in found)


@cache
def lengths(dim: int, alarm: float) -> tuple[float, float]:
    """Return χ_low and χ_high: a standard Gaussian vector of length outside has probability `alarm` each.

    >>> low, high = lengths(100, 1e-6)
    >>> round(low, 2), round(high, 2)
    (6.82, 13.5)
    """
    half = dim / 2
    low, high = scipy.special.gammaincinv(half, alarm), scipy.special.gammainccinv(half, alarm)
    return math.sqrt(2 * low), math.sqrt(2 * high)


def convict(
    gram: Array, law: Law, liars: int, alarm: float, seen: Callable[[], Sequence[Direction]] | None = None
) -> list[Expulsion]:
    """Return who lies, by their place in `gram` (m, m), the Gram matrix of the members' sums.

    `liars` is how many of them may lie; honest clients are expelled with probability at most `alarm` as long
    as there are no more, those set aside with a liar excepted. Members that sent nothing yet have no variance
    and are left alone. `seen` gives the visible directions of the others, where somebody else needs them too.
    """
    heard = law.heard
    if not len(heard):
        return []
    known, m = law.select(heard), len(heard)
    inner = gram if m == len(gram) else gram[np.ix_(heard, heard)]
    low, high = lengths(law.dim, alarm / (2 * m * m))
    deviation = known.deviation
    bound = known.bounds / deviation
    found: dict[int, Expulsion] = {}
    if not _within(inner, known, low, high):
        unit = inner / np.outer(deviation, deviation)
        own = np.sqrt(np.maximum(unit.diagonal(), 0.0))
        for i in np.flatnonzero((own > high + bound) | (own < low - bound)):
            below = bool(own[i] < low - bound[i])
            limit = low - bound[i] if below else high + bound[i]
            found[int(i)] = Expulsion(int(heard[i]), "length", float(own[i]), float(limit), below)
        found |= _by_pairs(unit, known.pairs, bound, (low, high), heard, found, liars)
    if not found:
        found = by_direction(
            seen or (lambda: visible(inner, known, liars + 1)), deviation, bound, heard, liars, alarm
        )
    return [found[i] for i in sorted(found)]


def _within(inner: Array, law: Law, low: float, high: float) -> bool:
    """Tell whether all lengths and pairs are as they should be; False also where that takes a closer look.

    Where all were heard alike it takes the longest and the shortest, and nearly every look comes to no more.
    """
    if law.alike is None:
        return False
    (own, shared), bound = law.alike, float(law.bounds.min()) / math.sqrt(law.alike[0])
    squares, twice = inner.diagonal() / own, inner * (2 / own)
    both = squares[:, None] + squares[None, :]
    checked = [(squares, 1.0, bound)]
    for pair, sign in ((both + twice, 1.0), (both - twice, -1.0)) if len(inner) > 1 else ():
        np.fill_diagonal(pair, pair[0, 1])  # no client is a pair
        checked.append((pair, math.sqrt(max(2 * (1 + sign * shared / own), 0.0)), 2 * bound))
    return all(
        square.max() <= (high * scale + slack) ** 2 and square.min() >= max(low * scale - slack, 0.0) ** 2
        for square, scale, slack in checked
    )


def _by_pairs(
    unit: Array,
    scales: tuple[Array, Array],
    bound: Array,
    limits: tuple[float, float],
    heard: Any,
    gone: Mapping[int, Expulsion],
    liars: int,
) -> dict[int, Expulsion]:
    """Convict by sums and differences of two; `gone` are convicted already."""
    both = unit.diagonal()[:, None] + unit.diagonal()[None, :]
    slack = bound[:, None] + bound[None, :]
    pairs = []
    for sign, scale in zip((2.0, -2.0), scales, strict=True):
        length = np.sqrt(np.maximum(both + sign * unit, 0.0))
        pairs.append((length, limits[0] * scale - slack, limits[1] * scale + slack))
    if all(bool((length <= upper).all() and (length >= lower).all()) for length, lower, upper in pairs):
        return {}
    worst = np.zeros_like(unit)  # how far outside, as a share of the limit
    measured, allowed, below = (np.zeros_like(unit) for _ in range(3))
    for length, lower, upper in pairs:
        for low, limit in ((False, upper), (True, lower)):
            size = np.maximum(upper, 1e-300)  # nothing is its own difference
            outside = (limit - length if low else length - limit) / size
            better = outside > worst
            worst[better], measured[better], allowed[better] = outside[better], length[better], limit[better]
            below[better] = low
    left = np.ones(len(unit), bool)
    left[list(gone)] = False
    edges = (worst > 0) & left[:, None] & left[None, :]
    np.fill_diagonal(edges, False)

    def expelled(i: int, test: Test, others: Any) -> Expulsion:
        j = max(others, key=lambda other: worst[i, other])
        names = tuple(int(heard[other]) for other in others)
        return Expulsion(
            int(heard[i]), test, float(measured[i, j]), float(allowed[i, j]), bool(below[i, j]), names
        )

    found: dict[int, Expulsion] = {}
    while edges.any():
        degree = edges.sum(axis=1)
        i = int(np.argmax(degree))
        if degree[i] <= liars - len(gone) - len(found):
            break
        found[i] = expelled(i, "pairs", np.flatnonzero(edges[i]))
        edges[i] = edges[:, i] = False
    while edges.any():
        i, j = (int(place) for place in np.unravel_index(np.argmax(np.where(edges, worst, 0.0)), edges.shape))
        found[i], found[j] = expelled(i, "one of a pair", [j]), expelled(j, "one of a pair", [i])
        for k in (i, j):
            edges[k] = edges[:, k] = False
    return found


def by_direction(
    seen: Callable[[], Sequence[Direction]],
    deviation: Array,
    bound: Array,
    heard: Any,
    liars: int,
    alarm: float,
) -> dict[int, Expulsion]:
    """Convict by how far members moved along directions that stand out of the noise; at most `liars`."""
    found: dict[int, Expulsion] = {}
    m = len(heard)
    if not liars or m < 2 * liars + 1:
        return found
    high = float(scipy.special.ndtri(1 - alarm / (2 * m * (liars + 1))))
    for direction in seen():
        away, spread = from_the_middle(direction.along / deviation)
        limits = high * spread + SLACK * bound
        over = away - limits
        for i in np.argsort(-over)[:liars]:
            if over[i] > 0 and int(i) not in found and len(found) < liars:
                found[int(i)] = Expulsion(int(heard[i]), "direction", float(away[i]), float(limits[i]))
    return found
