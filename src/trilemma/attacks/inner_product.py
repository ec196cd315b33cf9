"""Attacks along the honest mean m: sign flip, Fall of Empires, inner product manipulation.

    sf     b = −m
    foe    b = (1 − τ) m = m + τ (−m)
    ipm    b = −ε m

They are one family, ε = τ − 1, under the names and scales of their papers: an aggregate with a negative inner
product with m turns descent into ascent, which a message does by itself when τ > 1 (ε > 0). All f Byzantine
clients send b. The strengths τ and ε are numbers, or "search": chosen every round against the server's
pipeline (`trilemma.attacks.search`).

References: sign flip as in Allen-Zhu et al., "Byzantine-resilient non-convex stochastic gradient descent",
ICLR 2021; Xie, Koyejo, Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product
manipulation", UAI 2019; the form with τ as in Allouah et al., "On the privacy-robustness-utility trilemma in
distributed learning", ICML 2023.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from trilemma.attacks.search import Search, fixed, searched
from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import minus_mean
from trilemma.attacks.types import Attack, Crafted, View

KNOWN = (1.1, 2.0, 11.0)
"""Strengths τ of published experiments: ε = 0.1 hides in the spread, the sign flip, and ε = 10."""


@attacks.register("sf")
class SignFlip(AttackSettings):
    """Sign flip: minus the honest mean."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack(
            "sf", craft=lambda view: replace(fixed(view, minus_mean, 2.0), strength=None), columnwise=True
        )


@attacks.register("foe")
class FallOfEmpires(AttackSettings):
    """Fall of Empires: (1 − τ) × the honest mean."""

    strength: float | Literal["search"] = "search"
    """τ: a number, or searched in every round."""
    search: Search = Search()
    """How a strength is searched."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("foe", craft=self._craft, columnwise=self.strength != "search")

    def _craft(self, view: View) -> Crafted:
        if self.strength == "search":
            return searched(view, minus_mean, self.search, KNOWN)
        return fixed(view, minus_mean, self.strength)


@attacks.register("ipm")
class InnerProduct(AttackSettings):
    """Inner product manipulation: −ε × the honest mean."""

    strength: float | Literal["search"] = 10.0
    """ε: a number, or searched in every round."""
    search: Search = Search()
    """How a strength is searched."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("ipm", craft=self._craft, columnwise=self.strength != "search")

    def _craft(self, view: View) -> Crafted:
        if self.strength == "search":
            crafted = searched(view, minus_mean, self.search, KNOWN)
        else:
            crafted = fixed(view, minus_mean, 1.0 + self.strength)
        epsilon = None if crafted.strength is None else crafted.strength - 1.0
        return Crafted(crafted.messages, epsilon)
