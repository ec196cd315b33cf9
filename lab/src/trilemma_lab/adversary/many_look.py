"""The limits that many Gram matrices of one round are tested against, on the device where these lie.

The limits change from round to round and are copied to the device in one piece: a dozen small copies would
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
from trilemma.learning.defences.evidence.conviction import SLACK, lengths
from trilemma.learning.defences.evidence.correction import edge
from trilemma.learning.steps.trace import Array, Law, Places, whitened


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
class ManyLook:
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
        shares: Array | None,
        rows: Tensor | None,
        device: torch.device,
    ) -> ManyLook:
        """Return the look at m clients with this law, of whom at most `liars` lie, on a device.

        Honest clients are expelled with probability at most `alarm`. `shares` (m,) scale up the moves of
        clients that were not heard in every round; None: nothing is set right by this look.
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
            parts["whitening"] = law.whitening if facts.telling else np.zeros((m, m))
        packed = np.concatenate([parts[name].ravel() for name in facts.shapes])
        return cls(facts, to_the_device(packed, device), rows, law)

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
    """Return `ManyLook.sizes`, filled from m − liars members on: no more than `liars` are ever left out."""
    members, (own, shared) = len(law.bounds), law.alike or (1.0, 0.0)
    found = np.ones((members + 1, 3))
    for count in range(max(1, members - liars), members + 1):
        found[count] = (_edge(count, law.dim), *whitened(own, shared, count))
    return found


_edge = cache(edge)


def rows_of(rows: Places, count: int, device: torch.device) -> Tensor | None:
    """Return `rows` on the device; None if they are all of the `count` vectors.

    >>> rows_of(np.arange(3), 3, torch.device("cpu")), rows_of(np.arange(2), 3, torch.device("cpu"))
    (None, tensor([0, 1]))
    """
    return None if len(rows) == count else to_the_device(rows, device)
