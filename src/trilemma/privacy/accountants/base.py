"""What an accountant is: five questions about a history of releases, answered on the safe side.

The questions' edges are the same for everyone and are settled here: a history that the accountant is not for
is refused, no rounds cost nothing, no noise costs everything. An accountant's own file answers the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from trilemma.errors import PrivacyError, UserError
from trilemma.privacy.accountants.search import least_multiplier
from trilemma.privacy.gaussian import check_delta
from trilemma.privacy.mechanism import History, Mechanism
from trilemma.registry import Registry

Array = NDArray[np.float64]
_CURVE_POINTS = 24


@dataclass(frozen=True)
class Accountant(ABC):
    """An accountant under the name it is registered by.

    The class says what it assumes and when to prefer it:

    * `assumes`: which releases it is for, in words that follow "is for";
    * `rank`: its place in listings, and in the choice when none is named;
    * `quick`: whether it can be asked in every round of a run;
    * `tight`: whether its figure is the true one, so that no other can be smaller;
    * `repeatable`: whether its figure is the same, to six digits, wherever it is computed;
    * `tells_delta`: whether it also answers for δ at a given ε;
    * `instead`: the accountant that answers where this one fails.
    """

    name: str

    assumes: ClassVar[str]
    rank: ClassVar[int]
    quick: ClassVar[bool] = False
    tight: ClassVar[bool] = False
    repeatable: ClassVar[bool] = True
    tells_delta: ClassVar[bool] = True
    instead: ClassVar[str] = ""

    @abstractmethod
    def applies(self, rounds: History) -> bool:
        """Tell whether `rounds` are what this accountant is for."""

    def epsilon(self, rounds: History, delta: float) -> float:
        """Return ε of all `rounds` together at δ: 0 without a round, infinite without noise."""
        check_delta(delta)
        self._check(rounds)
        if sum(count for _, count in rounds) == 0:
            return 0.0
        return math.inf if _bare(rounds) else self._epsilon(rounds, delta)

    def delta(self, rounds: History, epsilon: float) -> float:
        """Return δ of all `rounds` together at ε: 0 without a round, 1 without noise."""
        if not epsilon >= 0:
            raise PrivacyError(f"epsilon is not negative, got {epsilon}")
        self._check(rounds)
        if sum(count for _, count in rounds) == 0:
            return 0.0
        return 1.0 if _bare(rounds) else self._delta(rounds, epsilon)

    def curve(self, one: Mechanism, rounds: int, delta: float) -> Array:
        """Return ε after each of the rounds 1 … `rounds` of the same mechanism."""
        check_delta(delta)
        self._check(((one, rounds),))
        return np.full(rounds, np.inf) if one.z == 0 else self._curve(one, rounds, delta)

    def multiplier(self, epsilon: float, delta: float, rounds: int, like: Mechanism) -> float:
        """Return the least noise multiplier whose `rounds` rounds cost at most `epsilon`, on the safe side.

        `like` gives sampling and adjacency; its z is where a search starts.
        """
        check_delta(delta)
        if not epsilon > 0:
            raise PrivacyError(f"epsilon is positive, got {epsilon}")
        if rounds < 1:
            raise UserError(f"calibration needs at least one round, got {rounds}")
        if math.isinf(epsilon):
            return 0.0
        self._check(((like, rounds),))
        return self._multiplier(epsilon, delta, rounds, like)

    def _check(self, rounds: History) -> None:
        if not self.applies(rounds):
            allowed = ", ".join(able.name for able in applicable(rounds))
            raise UserError(
                f"accountant {self.name!r} does not apply to these releases; use one of: {allowed}. "
                f"{self.name!r} is for {self.assumes}"
            )

    @abstractmethod
    def _epsilon(self, rounds: History, delta: float) -> float:
        """Return ε of at least one round, all of them with noise."""

    @abstractmethod
    def _delta(self, rounds: History, epsilon: float) -> float:
        """Return δ of at least one round, all of them with noise."""

    def _curve(self, one: Mechanism, rounds: int, delta: float) -> Array:
        """Ask for a few dozen rounds only; in between stands the next larger one's ε."""
        chosen = np.unique(np.geomspace(1, rounds, min(rounds, _CURVE_POINTS)).round().astype(int))
        values = np.array([self._epsilon(((one, int(count)),), delta) for count in chosen])
        return values[np.searchsorted(chosen, np.arange(1, rounds + 1))]

    def _multiplier(self, epsilon: float, delta: float, rounds: int, like: Mechanism) -> float:
        """Search for it, one ε after the other."""
        return least_multiplier(
            lambda z: self._epsilon(((replace(like, z=z), rounds),), delta), epsilon, like.z
        )


def _bare(rounds: History) -> bool:
    return any(one.z == 0 and count for one, count in rounds)


accountants: Registry[Accountant] = Registry("accountant")
"""Every accountant by name."""


def applicable(rounds: History) -> tuple[Accountant, ...]:
    """Return the accountants that are for `rounds`, in the order of their ranks.

    >>> [able.name for able in applicable(((Mechanism(1.0), 30),))]
    ['exact', 'rdp', 'pld']
    """
    return tuple(sorted((a for a in accountants.values() if a.applies(rounds)), key=lambda a: a.rank))


Kind = TypeVar("Kind", bound=Accountant)


def accountant(name: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator that enters an accountant of the decorated class under `name`."""

    def enter(kind: type[Kind]) -> type[Kind]:
        accountants.register(name)(kind(name))
        return kind

    return enter
