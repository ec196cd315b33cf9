"""Which clients are proved to lie.

**Lengths.** For honest clients i and j, the noise in S_i, and in S_i/√K_ii ± S_j/√K_jj, is a Gaussian vector
of known variance, whatever their data and the other clients' behaviour: its squared length is a multiple of
χ²_d. The contributions are bounded, so by the triangle inequality

    √v χ_low − b ≤ ‖S‖ ≤ √v χ_high + b,

where S is the sum of a client or of a pair, v its variance and b its bound. Nothing is assumed about how
contributions depend on noise. A length outside proves a lie: of the client, or of at least one of the two.

**Which of the two.** One client alone can make a pair fail, for instance by copying the other's message, so a
failing pair accuses both. Honest clients accuse each other with at most the stated probability. Hence those
who accuse an honest client are liars, and there are at most as many of them as there may be liars. A client
accused by more than that is therefore a liar. Of every failing pair then left, both clients are set aside:
at least one of the two lies.

**Directions.** Along a direction v that stands out of the noise (`correction.visible`), caused by the honest
mean or by liars, each member's move ⟨S_i, v⟩/√K_ii is compared with the median. A client is expelled if it is
further away than k times the spread of the middle half (at least 1) plus twice the bound on the data; at most
as many as may lie. This test assumes that the others do not know a client's noise: liars who add an honest
client's noise to their own messages can turn the direction towards it, but then push the model nowhere else
(docs/frontier.md). It is run only if no length and no pair fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import scipy

from trilemma.base.records import Test
from trilemma.learning.defences.evidence.correction import Direction, from_the_middle, visible
from trilemma.learning.steps.trace import Array, Law, Places

SLACK = 2.0
"""How far apart two honest contributions may lie along a direction, in multiples of the bound."""


@dataclass(frozen=True)
class Expulsion:
    """Why a client was expelled: the test, what it measured, and the limit for honest clients.

    `statistic` is a length above `threshold`, or below it if `low`. `others` are the clients that failed the
    test as a pair with this one.
    """

    client: int
    test: Test
    statistic: float = math.nan
    threshold: float = math.nan
    low: bool = False
    others: tuple[int, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return the expulsion as JSON values."""
        found = asdict(self) | {"others": list(self.others)}
        return {name: None if value != value else value for name, value in found.items()}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Expulsion:
        """Return the expulsion that `plain` returned as JSON values.

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
    """Return the clients that are expelled."""
    return np.array([one.client for one in found], dtype=np.int64)


def proved(found: Sequence[Expulsion]) -> float:
    """Return how many liars the expulsions prove: one for every pair that was set aside together.

    >>> proved([Expulsion(0, "length"), Expulsion(1, "one of a pair"), Expulsion(2, "one of a pair")])
    2.0
    """
    return sum(0.5 if one.test == "one of a pair" else 1.0 for one in found)


@cache
def lengths(dim: int, alarm: float) -> tuple[float, float]:
    """Return χ_low and χ_high, for standard Gaussian vectors of `dim` numbers.

    Such a vector is shorter than χ_low with probability `alarm`, and longer than χ_high with the same.

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
    """Return the expulsions, clients by their place in `gram` (m, m), the Gram matrix of the members' sums.

    At most `liars` of them lie. If that is true, an honest client is expelled with probability at most
    `alarm`, except by being set aside with a liar. Members that have sent nothing have no variance and are
    not tested. `seen` returns the visible directions; a caller that needs them too passes it to share them.
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
    """Tell whether all lengths and pairs are within their limits; False also if this quick test cannot tell.

    If all clients were heard alike, it compares only the extremes with the limits. In nearly every look that
    is all the work.
    """
    if law.alike is None:
        return False
    (own, shared), bound = law.alike, float(law.bounds.min()) / math.sqrt(law.alike[0])
    squares, twice = inner.diagonal() / own, inner * (2 / own)
    both = squares[:, None] + squares[None, :]
    checked = [(squares, 1.0, bound)]
    for pair, sign in ((both + twice, 1.0), (both - twice, -1.0)) if len(inner) > 1 else ():
        np.fill_diagonal(pair, pair[0, 1])  # the diagonal is no pair
        checked.append((pair, math.sqrt(max(2 * (1 + sign * shared / own), 0.0)), 2 * bound))
    return all(
        square.max() <= (high * scale + slack) ** 2 and square.min() >= max(low * scale - slack, 0.0) ** 2
        for square, scale, slack in checked
    )


@dataclass(frozen=True)
class _Outside:
    """For every pair (m, m), the limit that it exceeds most.

    `by` is how far it is outside, relative to the upper limit, 0 if it is not; `length` and `limit` are what
    was measured and allowed, and `low` is 1 where the limit is a lower one.
    """

    by: Array
    length: Array
    limit: Array
    low: Array


def _pairs_outside(
    unit: Array, scales: tuple[Array, Array], bound: Array, limits: tuple[float, float]
) -> _Outside | None:
    """Compare sums and differences of two clients with their limits; None if all are within."""
    both = unit.diagonal()[:, None] + unit.diagonal()[None, :]
    slack = bound[:, None] + bound[None, :]
    pairs = []
    for sign, scale in zip((2.0, -2.0), scales, strict=True):
        length = np.sqrt(np.maximum(both + sign * unit, 0.0))
        pairs.append((length, limits[0] * scale - slack, limits[1] * scale + slack))
    if all(bool((length <= upper).all() and (length >= lower).all()) for length, lower, upper in pairs):
        return None
    found = _Outside(*(np.zeros_like(unit) for _ in range(4)))
    for length, lower, upper in pairs:
        for low, limit in ((False, upper), (True, lower)):
            size = np.maximum(upper, 1e-300)  # on the diagonal of differences the upper limit may be 0
            by = (limit - length if low else length - limit) / size
            more = by > found.by
            found.by[more], found.length[more], found.limit[more] = by[more], length[more], limit[more]
            found.low[more] = low
    return found


def _by_pairs(
    unit: Array,
    scales: tuple[Array, Array],
    bound: Array,
    limits: tuple[float, float],
    heard: Any,
    gone: Mapping[int, Expulsion],
    liars: int,
) -> dict[int, Expulsion]:
    """Convict by the lengths of sums and differences of two clients; `gone` are convicted already.

    `unit` (m, m) is the Gram matrix of S_i/√K_ii, `scales` are `Law.pairs`, `bound` (m,) the bounds in the
    same unit, `limits` χ_low and χ_high. Returns expulsions by place.
    """
    outside = _pairs_outside(unit, scales, bound, limits)
    if outside is None:
        return {}
    worst = outside.by
    left = np.ones(len(unit), bool)
    left[list(gone)] = False
    edges = (worst > 0) & left[:, None] & left[None, :]
    np.fill_diagonal(edges, False)

    def expelled(i: int, test: Test, others: Any) -> Expulsion:
        j = max(others, key=lambda other: worst[i, other])
        names = tuple(int(heard[other]) for other in others)
        length, limit = float(outside.length[i, j]), float(outside.limit[i, j])
        return Expulsion(int(heard[i]), test, length, limit, bool(outside.low[i, j]), names)

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
    """Convict at most `liars` members by how far from the median they moved along a visible direction."""
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
