"""The limits that Gram matrices of one round are tested against, on the device where these lie.

A defended server tests one Gram matrix a look, on its host. Liars who foresee what it does with hundreds of
lies test as many, perhaps on a GPU; the limits are then copied there in one piece: a dozen small copies would
take longer than all the work on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import scipy
import torch
from torch import Tensor

from trilemma.base.transfers import to_the_device
from trilemma.learning.steps.trace import Array, Law, whitened

SLACK = 2.0
"""How far apart two honest contributions may lie along a direction, in multiples of the bound."""

SURE = 3.2724
"""The 0.999 quantile of the Tracy–Widom law of order 1."""


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


@cache
def edge(members: int, dim: int) -> float:
    """Return the 0.999 quantile of the top eigenvalue of the Gram matrix of white noise (members, dim).

    >>> round(edge(100, 1290), 1)
    2182.7
    """
    inner, outer = math.sqrt(max(dim - 1, 1)), math.sqrt(members)
    spread = (inner + outer) * math.cbrt(1 / inner + 1 / outer)
    return (inner + outer) ** 2 + SURE * spread


@dataclass(frozen=True)
class LookFacts:
    """The facts of a look that usually stay the same from round to round.

    m `members`, `dim` coordinates d, how many members may be `liars`, whether all members were heard `alike`,
    and whether the look `corrects`: whether moves are set right along directions that stand out.
    """

    members: int
    dim: int
    liars: int
    alike: bool
    corrects: bool

    @property
    def telling(self) -> bool:
        """Whether directions are searched for: only if there may be liars and most members are honest."""
        return 0 < 2 * self.liars < self.members

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the numbers in a look; if all members are alike, of one client and one pair."""
        m = self.members
        if self.alike:
            return {"deviation": (1,), "limits": (4, 2), "reach": (2, 1), "sizes": (m + 1, 3), "shares": (m,)}
        return {
            "deviation": (m,),
            "units": (m, m),
            "limits": (4, m, m),
            "reach": (2, m),
            "sizes": (m + 1, 3),
            "whitening": (m, m),
            "shares": (m,),
        }


@dataclass(frozen=True, eq=False)
class LookLimits:
    """A look at the vectors of m clients that have all sent something: all that does not depend on a lie.

    Attributes:
        facts: What stays the same from round to round.
        numbers: The values of the properties below, in one tensor.
        rows: Which vectors are looked at; None: all.
        law: The law of honest vectors; used only if the clients are not alike.
    """

    facts: LookFacts
    numbers: Tensor
    rows: Tensor | None = None
    law: Law | None = None

    @classmethod
    def of(
        cls,
        law: Law,
        liars: int,
        alarm: float,
        shares: Array | None = None,
        rows: Tensor | None = None,
        device: torch.device | None = None,
    ) -> LookLimits:
        """Return the look at m clients with this law, of whom at most `liars` lie.

        Honest clients are expelled with probability at most `alarm`. `shares` (m,) scale up the moves of
        clients that were not heard in every round; None: nothing is set right by this look.
        `device` None: the host.
        """
        m = len(law.bounds)
        facts = LookFacts(m, law.dim, liars, law.alike is not None and m > 1, shares is not None)
        # If all are alike, the first client and the first pair stand for every other.
        few = slice(1) if facts.alike else slice(None)
        parts = {
            "deviation": law.deviation[few],
            "limits": _limits(law, alarm, slice(2) if facts.alike else slice(None))[:, few],
            "reach": _reach(law, liars, alarm)[:, few],
            "sizes": _sizes(law, liars),
            "shares": np.ones(m) if shares is None else shares,
        }
        if not facts.alike:
            parts["units"] = 1.0 / np.outer(law.deviation, law.deviation)
            parts["whitening"] = law.whitening
        packed = np.concatenate([parts[name].ravel() for name in facts.shapes])
        return cls(facts, to_the_device(packed, device or torch.device("cpu")), rows, law)

    @cached_property
    def _parts(self) -> dict[str, Tensor]:
        shapes = self.facts.shapes
        parts = torch.split(self.numbers, [math.prod(shape) for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of the noise in every client's vector (m,)."""
        return self._parts["deviation"].expand(self.facts.members)

    @property
    def units(self) -> Tensor:
        """The factors (m, m) that scale a Gram matrix so that noise has variance 1."""
        if not self.facts.alike:
            return self._parts["units"]
        return self._parts["deviation"].pow(-2).expand(self.facts.members, self.facts.members)

    @property
    def limits(self) -> Tensor:
        """Least and largest squared lengths (4, m, m) of sums of two vectors, then of differences.

        See `conviction.convict`. On the diagonal, the sum of a vector with itself tests its own length, and
        the limits of the difference never fail.
        """
        limits = self._parts["limits"]
        if not self.facts.alike:
            return limits
        return torch.where(self._own, limits[:, 0, None, None], limits[:, 1, None, None])

    @property
    def reach(self) -> Tensor:
        """How far from the median a client may move (2, m): a multiple of the spread, plus a constant."""
        return self._parts["reach"].expand(2, self.facts.members)

    @property
    def sizes(self) -> Tensor:
        """For 0 to m members who are alike (m + 1, 3): the edge, and the two eigenvalues of K^(-½)."""
        return self._parts["sizes"]

    @property
    def whitening(self) -> Tensor:
        """K^(-½) (m, m)."""
        if not self.facts.alike:
            return self._parts["whitening"]
        across, along = self.sizes[-1, 1:].unbind()
        found: Tensor = across * self._own + (along - across) / self.facts.members
        return found

    def white(self, grams: Tensor) -> Tensor:
        """Return K^(-½) `grams` K^(-½) (B, m, m), the Gram matrices of whitened vectors.

        On a processor without matrix products, if all members are alike.
        """
        if grams.is_cuda or not self.facts.alike:
            return self.whitening @ grams @ self.whitening
        across, along = self.sizes[-1, 1:].unbind()
        more = (along - across) / self.facts.members
        left = across * grams + more * grams.sum(1, keepdim=True)
        return across * left + more * left.sum(2, keepdim=True)

    @property
    def shares(self) -> Tensor:
        """The factors (m,) that scale up the moves of clients not heard in every round."""
        return self._parts["shares"]

    @property
    def _own(self) -> Tensor:
        """The identity matrix (m, m), bool."""
        place = torch.arange(self.facts.members, device=self.numbers.device)
        return place == place[:, None]


def _limits(law: Law, alarm: float, some: slice) -> Array:
    """Return the limits (4, k, k) of some of the clients."""
    m = max(len(law.bounds), 1)
    low, high = lengths(law.dim, alarm / (2 * m * m))
    own, found = law.bounds[some] / law.deviation[some], list[Array]()
    slack = np.add.outer(own, own)
    for scale in (whole[some, some] for whole in law.pairs):
        least = low * scale - slack
        # A lower limit below zero never fails, even if rounding makes a squared length of 0 negative.
        found += [np.where(least > 0, least**2, -np.inf), (high * scale + slack) ** 2]
    return np.stack(found)


def _reach(law: Law, liars: int, alarm: float) -> Array:
    m = len(law.bounds)
    high = float(scipy.special.ndtri(1 - alarm / (2 * max(m, 1) * (liars + 1))))
    return np.stack([np.full(m, high), SLACK * law.bounds / law.deviation])


def _sizes(law: Law, liars: int) -> Array:
    """Return `LookLimits.sizes`, filled from m − liars members on: no more than `liars` are ever left out."""
    members, (own, shared) = len(law.bounds), law.alike or (1.0, 0.0)
    found = np.ones((members + 1, 3))
    for count in range(max(1, members - liars), members + 1):
        found[count] = (edge(count, law.dim), *whitened(own, shared, count))
    return found
