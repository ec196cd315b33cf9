"""What an accountant is: five questions about a history of releases, answered on the safe side.

The questions' edges are the same for everyone and are settled here: a history that the accountant is not for
is refused, no rounds cost nothing, no noise costs everything. An accountant's own file answers the rest.

So is noise that is not quite the Gaussian one an accountant's own file speaks of: what the difference costs
in ε and in δ (`trilemma.privacy.noise.drawing`) is added here, over all rounds together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from trilemma.base.errors import PrivacyError, UserError
from trilemma.base.registry import Registry
from trilemma.privacy.accounting.accountants.search import least_multiplier
from trilemma.privacy.accounting.gaussian import LEAST_DELTA, check_delta
from trilemma.privacy.mechanism import History, Mechanism
from trilemma.privacy.noise.drawing import EXACT, Drawing, all_of, drawn_delta, surcharge

Array = NDArray[np.float64]
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
        drawing = _drawing(rounds)
        if drawing.exact:
            return self._epsilon(rounds, delta)
        return self._drawn(_accounted(rounds), delta, drawing).total

    def delta(self, rounds: History, epsilon: float) -> float:
        """Return δ of all `rounds` together at ε: 0 without a round, 1 without noise, else never 0."""
        if not epsilon >= 0:
            raise PrivacyError(f"epsilon is not negative, got {epsilon}")
        self._check(rounds)
        if sum(count for _, count in rounds) == 0:
            return 0.0
        if _bare(rounds):
            return 1.0
        left, times, added = drawn_delta(_drawing(rounds), epsilon)
        if left < 0:
            return 1.0
        found = times * self._delta(_accounted(rounds), left) + added
        return min(1.0, max(found, LEAST_DELTA))  # what floats cannot hold is not nothing

    def curve(self, past: Sequence[History], delta: float) -> Array:
        """Return ε after each of `past`, each a history that goes on from the one before; it never falls."""
        check_delta(delta)
        whole = past[-1]
        self._check(whole)
        if _bare(whole):
            return np.full(len(past), np.inf)
        if _drawing(whole).exact:
            return self._curve(past, delta)
        found = self._drawn(_accounted(whole), delta, _drawing(whole))
        if not math.isfinite(found.total):
            return np.full(len(past), np.inf)
        # What is left of δ after the last history is less than what is left before, so it will do for all.
        added = [surcharge(_drawing(one), found.at_most, delta).epsilon for one in past]
        return self._curve([_accounted(one) for one in past], found.left) + added

    def multiplier(
        self, epsilon: float, delta: float, rounds: int, like: Mechanism, beside: History = ()
    ) -> float:
        """Return the least noise multiplier whose `rounds` rounds cost at most `epsilon`, on the safe side.

        `like` gives sampling and adjacency; its z is where a search starts. What is released `beside` these
        rounds, with noise of its own, is in the cost.
        """
        check_delta(delta)
        if not epsilon > 0:
            raise PrivacyError(f"epsilon is positive, got {epsilon}")
        if rounds < 1:
            raise UserError(f"calibration needs at least one round, got {rounds}")
        if math.isinf(epsilon):
            return 0.0
        everything = ((like, rounds), *beside)
        self._check(everything)
        price = surcharge(_drawing(everything), epsilon, delta)
        if price.left <= 0 or price.epsilon >= epsilon:
            raise PrivacyError(
                f"the noise drawn is too far from a Gaussian to certify epsilon = {epsilon:g} at delta = "
                f"{delta:g} over {rounds} rounds: use fewer rounds, or a larger epsilon or delta"
            )
        (plain, _), *others = _accounted(everything)
        return self._multiplier(epsilon - price.epsilon, price.left, rounds, plain, tuple(others))

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

    def _curve(self, past: Sequence[History], delta: float) -> Array:
        """See `curve`; all of it with noise that is Gaussian."""
        return np.array([self._epsilon(one, delta) for one in past])

    def _drawn(self, rounds: History, delta: float, drawing: Drawing) -> _Drawn:
        """Return ε of accounted `rounds` and of what is drawn; the δ that is left falls as ε grows."""
        at_most = 0.0
        for _ in range(_STEPS):
            price = surcharge(drawing, at_most, delta)
            if price.left <= 0:
                break
            needed = self._epsilon(rounds, price.left)
            if needed <= at_most:
                return _Drawn(needed + price.epsilon, at_most, price.left)
            at_most = needed * (1 + _STEP)  # a little too far each time, so that the steps end
        return _Drawn(math.inf, math.inf, 0.0)

    def _multiplier(
        self, epsilon: float, delta: float, rounds: int, like: Mechanism, beside: History
    ) -> float:
        """Search for it, one ε after the other."""
        return least_multiplier(
            lambda z: self._epsilon(((replace(like, z=z), rounds), *beside), delta), epsilon, like.z
        )


@dataclass(frozen=True)
class _Drawn:
    """ε in all, what the accountant's share of it is at most, and how much of δ was left for that share."""

    total: float
    at_most: float
    left: float


def _drawing(rounds: History) -> Drawing:
    return all_of([one.drawing * count for one, count in rounds if count])


def _accounted(rounds: History) -> History:
    """Return the rounds with the noise that is accounted for."""
    return tuple((replace(one, drawing=EXACT), count) for one, count in rounds)


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
