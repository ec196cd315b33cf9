"""A Little Is Enough: hide in the honest spread, and shift every coordinate the same way.

    b = m + τ σ,    m, σ: mean and standard deviation of the honest messages, coordinate by coordinate

All f Byzantine clients send b. The strength τ is

* a number (negative: the other side, as the authors' code has it),
* "zmax", the authors' bound on what still hides: with s = ⌊n/2 + 1⌋ − f supporters needed for a majority,

      z_max = Φ⁻¹((n − f − s) / (n − f)),

* "search": chosen every round against the server's pipeline (`trilemma.attacks.search`).

With privacy noise σ is nearly constant and far longer than the gradient, so τ decides everything; the record
of a run says which τ was sent.

Reference: Baruch, Baruch, Goldberg, "A little is enough: circumventing defenses for distributed learning",
NeurIPS 2019.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Literal

from trilemma.attacks.search import Search, fixed, searched
from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import deviation
from trilemma.attacks.types import Attack, Crafted, View
from trilemma.base.errors import UserError


def zmax(clients: int, byzantine: int) -> float:
    """Return the largest number of standard deviations that hides `byzantine` among `clients`.

    It is negative where few Byzantine clients face many honest ones: nothing hides there.

    >>> round(zmax(50, 12), 4), round(zmax(100, 10), 4)
    (0.336, 0.1116)
    """
    if not _has_zmax(clients, byzantine):
        raise UserError(
            f"z_max needs an honest majority and at least 3 clients; got n = {clients}, f = {byzantine}; "
            'give ALIE a number or "search" as its strength'
        )
    honest = clients - byzantine
    supporters = clients // 2 + 1 - byzantine
    return NormalDist().inv_cdf((honest - supporters) / honest)


def _has_zmax(clients: int, byzantine: int) -> bool:
    return clients >= 3 and byzantine <= clients // 2


@attacks.register("alie")
class Alie(AttackSettings):
    """A Little Is Enough: honest mean plus τ honest standard deviations."""

    strength: float | Literal["zmax", "search"] = "search"
    """τ: a number, the bound z_max, or searched in every round."""
    search: Search = Search()
    """How a strength is searched."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("alie", craft=self._craft, columnwise=self.strength != "search")

    def _craft(self, view: View) -> Crafted:
        n, f = view.clients, view.byzantine
        if self.strength == "search":
            anchors = (1.5, zmax(n, f)) if _has_zmax(n, f) else (1.5,)
            return searched(view, deviation, self.search, anchors)
        return fixed(view, deviation, zmax(n, f) if self.strength == "zmax" else self.strength)
