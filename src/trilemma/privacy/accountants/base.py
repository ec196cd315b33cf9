"""What an accountant is: five questions about a history of releases, answered on the safe side.

The questions' edges are the same for everyone and are settled here: a history that the accountant is not for
is refused, no rounds cost nothing, no noise costs everything. An accountant's own file answers the rest.

So is noise that is not quite Gaussian. If what is drawn in all rounds together is within τ of the Gaussian in
total variation (the distances of the rounds add up), an (ε, δ) guarantee of the Gaussian is one of
(ε, δ + (1 + e^ε) τ) of what is drawn: each of the two data sets moves by τ, one of them counted e^ε times.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
_STEP, _STEPS = 1e-9, 100


@dataclass(frozen=True)
class Accountant(ABC):
    """An accountant under the name it is registered by.

    The class says what it assumes and when to prefer it:

    * `assumes`: which releases it is for, in words that follow "is for";
    * `rank`: its place in listings and in the choice when none is named, the tightest first;
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
        if _bare(rounds):
            return math.inf
        tau = _distance(rounds)
        return self._epsilon(rounds, delta) if tau == 0 else self._drawn_epsilon(rounds, delta, tau)

    def delta(self, rounds: History, epsilon: float) -> float:
        """Return δ of all `rounds` together at ε: 0 without a round, 1 without noise."""
        if not epsilon >= 0:
            raise PrivacyError(f"epsilon is not negative, got {epsilon}")
        self._check(rounds)
        if sum(count for _, count in rounds) == 0:
            return 0.0
        if _bare(rounds):
            return 1.0
        return min(1.0, self._delta(rounds, epsilon) + _surcharge(epsilon, _distance(rounds)))

    def curve(self, one: Mechanism, rounds: int, delta: float) -> Array:
        """Return ε after each of the rounds 1 … `rounds` of the same mechanism."""
        check_delta(delta)
        self._check(((one, rounds),))
        if one.z == 0:
            return np.full(rounds, np.inf)
        return self._curve(one, rounds, delta) if one.distance == 0 else self._few(one, rounds, delta)

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
        left = delta - _surcharge(epsilon, rounds * like.distance)
        if left <= 0:
            raise PrivacyError(
                f"the noise drawn is too far from a Gaussian (total variation {like.distance:g} a "
                f"round) to certify epsilon = {epsilon:g} at delta = {delta:g}: use fewer rounds, or a "
                "larger delta"
            )
        return self._multiplier(epsilon, left, rounds, replace(like, distance=0.0))

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
        """See `curve`; of noise that is Gaussian."""
        return self._few(one, rounds, delta)

    def _few(self, one: Mechanism, rounds: int, delta: float) -> Array:
        """Ask for a few dozen rounds only; in between stands the next larger one's ε."""
        return at_few(rounds, lambda counts: np.array([self.epsilon(((one, n),), delta) for n in counts]))

    def _drawn_epsilon(self, rounds: History, delta: float, tau: float) -> float:
        """Return the least ε that is left with enough δ; the δ that is left falls as ε grows."""
        epsilon = 0.0
        for _ in range(_STEPS):
            left = delta - _surcharge(epsilon, tau)
            if left <= 0:
                return math.inf
            needed = self._epsilon(rounds, left)
            if needed <= epsilon:
                return epsilon
            epsilon = needed * (1 + _STEP)  # a little too far each time, so that the steps end
        return math.inf

    def _multiplier(self, epsilon: float, delta: float, rounds: int, like: Mechanism) -> float:
        """Search for it, one ε after the other."""
        return least_multiplier(
            lambda z: self._epsilon(((replace(like, z=z), rounds),), delta), epsilon, like.z
        )


def _distance(rounds: History) -> float:
    return math.fsum(count * one.distance for one, count in rounds)


def _surcharge(epsilon: float, tau: float) -> float:
    """Return the δ that noise within τ of the Gaussian costs at ε."""
    return 0.0 if tau == 0 else tau * (1 + math.exp(min(epsilon, 700.0)))


def at_few(rounds: int, epsilons: Callable[[Sequence[int]], Array]) -> Array:
    """Return a curve over `rounds` rounds from ε at a few dozen of them, in rising order, the last included.

    >>> at_few(100, lambda counts: np.array(counts, float))[[0, 89, 99]].tolist()
    [1.0, 100.0, 100.0]
    """
    chosen = np.unique(np.geomspace(1, rounds, min(rounds, _CURVE_POINTS)).round().astype(int))
    return epsilons(chosen.tolist())[np.searchsorted(chosen, np.arange(1, rounds + 1))]


def _bare(rounds: History) -> bool:
    return any(one.z == 0 and count for one, count in rounds)


accountants: Registry[Accountant] = Registry("accountant")
"""Every accountant by name."""


def applicable(rounds: History) -> tuple[Accountant, ...]:
    """Return the accountants that are for `rounds`, in the order of their ranks.

    >>> [able.name for able in applicable(((Mechanism(1.0), 30),))]
    ['exact', 'pld', 'rdp']
    """
    return tuple(sorted((a for a in accountants.values() if a.applies(rounds)), key=lambda a: a.rank))


Kind = TypeVar("Kind", bound=Accountant)


def accountant(name: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return a decorator that enters an accountant of the decorated class under `name`."""

    def enter(kind: type[Kind]) -> type[Kind]:
        accountants.register(name)(kind(name))
        return kind

    return enter
