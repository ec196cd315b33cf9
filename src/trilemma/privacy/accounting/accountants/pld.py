"""The accountant of privacy-loss distributions: the tightest for sampled releases, and the slowest.

Formulas: `trilemma.privacy.accounting.pld`; distributions are composed by dp-accounting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from trilemma.privacy.accounting.accountants.base import Accountant, Array, accountant, accountants
from trilemma.privacy.accounting.accountants.search import least_multiplier
from trilemma.privacy.accounting.pld import pld_curve, pld_delta, pld_epsilon
from trilemma.privacy.mechanism import History, Mechanism

_COARSER = 8.0  # the grid of a search
_STEPS = 3000  # of a curve's grid, up to its last ε


@accountant("pld")
@dataclass(frozen=True)
class Pld(Accountant):
    """Privacy-loss distributions: tight up to a grid, for every sampling scheme.

    Their figures depend on the release of dp-accounting in their last digits, and where a grid gets too large
    there are none; `rdp`, which is looser, then answers instead.

    >>> round(Pld("pld").epsilon(((Mechanism(1.27128345), 30),), 1e-4), 1)
    24.6
    """

    assumes: ClassVar[str] = "every release whose losses fit on a grid"
    rank: ClassVar[int] = 1
    repeatable: ClassVar[bool] = False
    instead: ClassVar[str] = "rdp"

    def applies(self, rounds: History) -> bool:
        """Tell that it always applies."""
        return True

    def _epsilon(self, rounds: History, delta: float) -> float:
        return pld_epsilon(rounds, delta)

    def _delta(self, rounds: History, epsilon: float) -> float:
        return pld_delta(rounds, epsilon)

    def _curve(self, past: Sequence[History], delta: float) -> Array:
        """Lay the losses out once, as finely as ε needs; the last figure, the run's, is the finest grid's."""
        last = self._epsilon(past[-1], delta)
        return np.minimum([*pld_curve(past[:-1], delta, last / _STEPS), last], last)

    def _multiplier(
        self, epsilon: float, delta: float, rounds: int, like: Mechanism, beside: History
    ) -> float:
        """Return it up to a thousandth too large."""

        def coarse(z: float) -> float:
            return pld_epsilon(((replace(like, z=z), rounds), *beside), delta, _COARSER)

        # A coarse grid is on the safe side too. The looser accountant says where to start.
        start = accountants[self.instead].multiplier(epsilon, delta, rounds, like, beside)
        z = least_multiplier(coarse, epsilon, start, 1e-4)
        while self._epsilon(((replace(like, z=z), rounds), *beside), delta) > epsilon:
            z *= 1 + 1e-6
        return z
