"""The accountant of Theorem C.1: kept to compare with the paper that states it.

Formula: `trilemma.privacy.accounting.rdp.theorem_c1`.

Reference: Allouah, Guerraoui, Gupta, Pinot, Stephan (ICML 2023), "On the Privacy-Robustness-Utility Trilemma
in Distributed Learning" (SAFE-DSHB), Appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trilemma.base.errors import UserError
from trilemma.privacy.accounting.accountants.base import Accountant, accountant
from trilemma.privacy.accounting.rdp import theorem_c1
from trilemma.privacy.mechanism import History


@accountant("c1")
@dataclass(frozen=True)
class TheoremC1(Accountant):
    """Theorem C.1 of SAFE-DSHB, as stated, for sampling without replacement.

    >>> from trilemma.privacy.mechanism import Mechanism
    >>> from trilemma.privacy.types import Sampling
    >>> one = Mechanism(1.0, Sampling("without-replacement", 25 / (11055 / 4)))
    >>> round(TheoremC1("c1").epsilon(((one, 400),), 1e-4), 2)
    2.17
    """

    assumes: ClassVar[str] = "one mechanism, sampled without replacement, when an example is replaced"
    rank: ClassVar[int] = 3
    tells_delta: ClassVar[bool] = False

    def applies(self, rounds: History) -> bool:
        """Tell whether all rounds are alike, sampled without replacement, and a record is replaced."""
        if len(rounds) != 1:
            return False
        ((one, _),) = rounds
        return (
            not one.gaussian and one.sampling.scheme == "without-replacement" and one.adjacency == "replace"
        )

    def _epsilon(self, rounds: History, delta: float) -> float:
        ((one, count),) = rounds
        return theorem_c1(one.z, one.sampling.rate, count, delta)

    def _delta(self, rounds: History, epsilon: float) -> float:
        raise UserError("Theorem C.1 is stated for ε at a given δ: use the accountant 'rdp' or 'pld' for δ")
