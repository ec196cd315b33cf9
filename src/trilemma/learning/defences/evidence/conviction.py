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

**Directions.** Along a direction v that stands out of the noise (`directions.visible`), caused by the honest
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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma.base.records import Test
from trilemma.learning.defences.evidence.directions import Directions, from_the_middle, visible
from trilemma.learning.defences.evidence.limits import LookLimits
from trilemma.learning.steps.trace import Array, Law, Places


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


def improbable(grams: Tensor, looks: Sequence[LookLimits]) -> Tensor:
    """Tell (L, B) which Gram matrices (L, B, m, m) of L looks prove a lie by lengths or pairs."""
    unit = grams * torch.stack([look.units for look in looks])[:, None]
    squares = unit.diagonal(dim1=2, dim2=3)
    both = squares[..., :, None] + squares[..., None, :]
    least, most, nearest, furthest = torch.stack([look.limits for look in looks])[:, :, None].unbind(1)
    more, less = both + 2 * unit, both - 2 * unit
    outside = (more < least) | (more > most) | (less < nearest) | (less > furthest)
    return outside.flatten(2).any(2)


def apart(seen: Directions, look: LookLimits) -> Tensor:
    """Tell (B,) where a client is expelled for its move along a direction."""
    if not (len(seen) and look.facts.telling):
        return torch.zeros(len(seen.there), dtype=torch.bool, device=seen.there.device)
    away, limits = _reached(seen, look)
    return ((away > limits) & seen.there[:, :, None]).flatten(1).any(1)


def _reached(seen: Directions, look: LookLimits) -> tuple[Tensor, Tensor]:
    """Return how far from the median members moved along directions (B, q, m), and how far they may."""
    away, scale = from_the_middle(seen.along / look.deviation, None)
    return away, look.reach[0] * scale + look.reach[1]


def convict(
    gram: Array, law: Law, liars: int, alarm: float, seen: Callable[[], Directions] | None = None
) -> list[Expulsion]:
    """Return the expulsions, clients by their place in `gram` (m, m), the Gram matrix of the members' sums.

    At most `liars` of them lie. If that is true, an honest client is expelled with probability at most
    `alarm`, except by being set aside with a liar. Members that have sent nothing have no variance and are
    not tested. `seen` returns the visible directions; a caller that needs them too passes it to share them.
    """
    heard = law.participating
    if not len(heard):
        return []
    inner = torch.from_numpy(gram if len(heard) == len(gram) else gram[np.ix_(heard, heard)])
    look = LookLimits.of(law.select(heard), liars, alarm)
    found: dict[int, Expulsion] = {}
    if bool(improbable(inner[None, None], [look]).any()):
        found = _by_lengths(inner, look, heard, liars)
    if not found:
        found = _by_direction(visible(inner[None, None], [look])[0] if seen is None else seen(), look, heard)
    return [found[i] for i in sorted(found)]


def _by_lengths(inner: Tensor, look: LookLimits, heard: Places, liars: int) -> dict[int, Expulsion]:
    """Convict by lengths and by pairs; return expulsions by place."""
    outside = _outside(inner, look)
    found = {
        int(i): Expulsion(
            int(heard[i]),
            "length",
            float(outside.length[i, i]) / 2,  # that of the sum of a vector with itself
            float(outside.limit[i, i]) / 2,
            bool(outside.low[i, i]),
        )
        for i in np.flatnonzero(outside.by.diagonal() > 0)
    }
    return found | _by_pairs(outside, heard, found, liars)


@dataclass(frozen=True)
class _Outside:
    """For every pair (m, m), the limit that it exceeds most; on the diagonal, for a vector added to itself.

    `by` is how far it is outside, relative to the upper limit, 0 if it is not; `length` and `limit` are what
    was measured and allowed, and `low` is 1 where the limit is a lower one.
    """

    by: Array
    length: Array
    limit: Array
    low: Array


def _outside(inner: Tensor, look: LookLimits) -> _Outside:
    """Compare sums and differences of two clients with their limits."""
    unit = inner * look.units
    both = unit.diagonal()[:, None] + unit.diagonal()[None, :]
    lengths = [(both + sign * unit).clamp(min=0.0).sqrt().numpy() for sign in (2.0, -2.0)]
    least, most, nearest, furthest = look.limits.clamp(min=0.0).sqrt().numpy()
    found = _Outside(*(np.zeros_like(least) for _ in range(4)))
    for length, lower, upper in ((lengths[0], least, most), (lengths[1], nearest, furthest)):
        for low, limit in ((False, upper), (True, lower)):
            size = np.maximum(upper, 1e-300)  # on the diagonal of differences the upper limit may be 0
            by = (limit - length if low else length - limit) / size
            more = by > found.by
            found.by[more], found.length[more], found.limit[more] = by[more], length[more], limit[more]
            found.low[more] = low
    return found


def _by_pairs(
    outside: _Outside, heard: Places, gone: Mapping[int, Expulsion], liars: int
) -> dict[int, Expulsion]:
    """Convict by the lengths of sums and differences of two clients; `gone` are convicted already.

    Returns expulsions by place.
    """
    worst = outside.by
    left = np.ones(len(worst), bool)
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


def _by_direction(seen: Directions, look: LookLimits, heard: Places) -> dict[int, Expulsion]:
    """Convict at most as many as may lie by how far from the median they moved along a visible direction."""
    found: dict[int, Expulsion] = {}
    liars = look.facts.liars
    if not look.facts.telling or not len(seen):
        return found
    away, limits = (part[0].numpy() for part in _reached(seen, look))
    for far, most in zip(away, limits, strict=True):
        over = far - most
        for i in np.argsort(-over)[:liars]:
            if over[i] > 0 and int(i) not in found and len(found) < liars:
                found[int(i)] = Expulsion(int(heard[i]), "direction", float(far[i]), float(most[i]))
    return found
