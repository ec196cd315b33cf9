"""A Little Is Enough: hide in the honest spread, and shift every coordinate the same way.

    b = m + τ σ,    m, σ: mean and standard deviation of the honest messages, coordinate by coordinate

All f Byzantine clients send b. The strength τ is a number (negative: the other side, as the authors' code has
it), or "zmax", the authors' bound on what still hides: with s = ⌊n/2 + 1⌋ − f honest supporters needed for a
majority,

    z_max = Φ⁻¹((n − f − s) / (n − f)).

With privacy noise σ is nearly constant and far longer than the gradient, so τ decides everything; the record
of a run says which τ was sent.

Reference: Baruch, Baruch, Goldberg, "A little is enough: circumventing defenses for distributed learning",
NeurIPS 2019.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Literal

from trilemma.attacks.settings import AttackSettings, attacks
from trilemma.attacks.span import deviation, draw_line, finite_rows
from trilemma.attacks.types import Attack, Crafted, View
from trilemma.errors import UserError


def zmax(clients: int, byzantine: int) -> float:
    """Return the largest number of standard deviations that hides `byzantine` among `clients`.

    >>> round(zmax(50, 12), 4), round(zmax(100, 10), 4)
    (0.336, 0.1116)
    """
    honest = clients - byzantine
    supporters = clients // 2 + 1 - byzantine
    if supporters < 1 or honest <= supporters:
        raise UserError(
            f"z_max needs an honest majority and at least 3 clients; got n = {clients}, f = {byzantine}; "
            'give ALIE a number or "search" as its strength'
        )
    return NormalDist().inv_cdf((honest - supporters) / honest)


@attacks.register("alie")
class Alie(AttackSettings):
    """A Little Is Enough: honest mean plus τ honest standard deviations.

    >>> Alie(strength=1.5).build().name
    'alie'
    """

    strength: float | Literal["zmax"] = "zmax"

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("alie", craft=self._craft)

    def _craft(self, view: View) -> Crafted:
        tau = zmax(view.clients, view.byzantine) if self.strength == "zmax" else self.strength
        message = draw_line(finite_rows(view.honest), deviation).at(tau).to(view.honest.dtype)
        return Crafted(message.expand(view.byzantine, -1), tau)
