"""Attacks along the honest mean m: sign flip, Fall of Empires, inner product manipulation.

    sf     b = −m
    foe    b = (1 − τ) m = m + τ (−m)
    ipm    b = −ε m

They are one family, ε = τ − 1, under the names and scales of their papers: an aggregate with a negative inner
product with m turns descent into ascent, which a message does by itself when τ > 1 (ε > 0). All f Byzantine
clients send b.

References: sign flip as in Allen-Zhu et al., "Byzantine-resilient non-convex stochastic gradient descent",
ICLR 2021; Xie, Koyejo, Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product
manipulation", UAI 2019.
"""

from __future__ import annotations

from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import draw_line, finite_rows, minus_mean
from trilemma.attacks.types import Attack, Crafted, View


@attacks.register("sf")
class SignFlip(AttackSettings):
    """Sign flip: minus the honest mean.

    >>> SignFlip().build().name
    'sf'
    """

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("sf", craft=lambda view: _along_mean(view, tau=2.0))


@attacks.register("foe")
class FallOfEmpires(AttackSettings):
    """Fall of Empires: (1 − τ) × the honest mean.

    >>> FallOfEmpires(strength=1.1).build().name
    'foe'
    """

    strength: float = 2.0

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("foe", craft=self._craft)

    def _craft(self, view: View) -> Crafted:
        crafted = _along_mean(view, self.strength)
        return Crafted(crafted.messages, self.strength)


@attacks.register("ipm")
class InnerProduct(AttackSettings):
    """Inner product manipulation: −ε × the honest mean.

    >>> InnerProduct(strength=10.0).build().name
    'ipm'
    """

    strength: float = 10.0

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("ipm", craft=self._craft)

    def _craft(self, view: View) -> Crafted:
        crafted = _along_mean(view, 1.0 + self.strength)
        return Crafted(crafted.messages, self.strength)


def _along_mean(view: View, tau: float) -> Crafted:
    message = draw_line(finite_rows(view.honest), minus_mean).at(tau).to(view.honest.dtype)
    return Crafted(message.expand(view.byzantine, -1))
