"""The exact accountant: plain Gaussian rounds are together one Gaussian mechanism.

Formulas: `trilemma.privacy.accounting.gaussian` (Balle and Wang, ICML 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from trilemma.base.errors import PrivacyError
from trilemma.privacy.accounting.accountants.base import Accountant, Array, accountant
from trilemma.privacy.accounting.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from trilemma.privacy.mechanism import History, Mechanism

_SAFE = 1 + 1e-12


@accountant("exact")
@dataclass(frozen=True)
class Exact(Accountant):
    """Composition of plain Gaussian mechanisms, in closed form.

    >>> round(Exact("exact").epsilon(((Mechanism(1.27128345), 30),), 1e-4), 1)
    24.6
    """

    assumes: ClassVar[str] = "releases without sampling"
    rank: ClassVar[int] = 0
    quick: ClassVar[bool] = True
    tight: ClassVar[bool] = True

    def applies(self, rounds: History) -> bool:
        """Tell whether every example is used in every round."""
        return all(one.gaussian for one, _ in rounds)

    def _epsilon(self, rounds: History, delta: float) -> float:
        return _epsilon(_mu(rounds), delta)

    def _delta(self, rounds: History, epsilon: float) -> float:
        return float(gaussian_delta(_mu(rounds), epsilon))

    def _curve(self, past: Sequence[History], delta: float) -> Array:
        return gaussian_epsilon(np.array([_mu(one) for one in past]), delta)

    def _multiplier(
        self, epsilon: float, delta: float, rounds: int, like: Mechanism, beside: History
    ) -> float:
        factor, mu, others = like.effective_z / like.z, gaussian_mu(epsilon, delta), _mu(beside)
        if others:
            if others >= mu:
                raise PrivacyError(
                    f"what is released beside the rounds costs epsilon = {epsilon:g} alone: no noise in the "
                    "rounds makes up for it"
                )
            mu = math.sqrt((mu - others) * (mu + others))
        return math.sqrt(rounds) / mu / factor * _SAFE


def _mu(rounds: History) -> float:
    return math.sqrt(math.fsum(count / one.effective_z**2 for one, count in rounds))


@lru_cache(maxsize=4096)
def _epsilon(mu: float, delta: float) -> float:
    """Remember: a ledger works out what it has spent whenever it is opened, and mostly the same."""
    return float(gaussian_epsilon(mu, delta))
