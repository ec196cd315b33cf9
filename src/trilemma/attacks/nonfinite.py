"""Messages that are not finite: they test the server's admission, not its rule.

    inf    b = (∞, …, ∞)
    nan    b = (NaN, …, NaN)

One such message makes a plain mean infinite or NaN too; a server that checks what it receives drops it.
"""

from __future__ import annotations

import math
from typing import ClassVar

from trilemma.attacks.settings import AttackSettings, Promise, attacks
from trilemma.attacks.types import Attack, Crafted, View


@attacks.register("inf")
class Infinite(AttackSettings):
    """Infinity in every coordinate."""

    lacks: ClassVar[frozenset[Promise]] = frozenset({"finite"})

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("inf", craft=lambda view: _constant(view, math.inf))


@attacks.register("nan")
class NotANumber(AttackSettings):
    """NaN in every coordinate."""

    lacks: ClassVar[frozenset[Promise]] = frozenset({"finite"})

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("nan", craft=lambda view: _constant(view, math.nan))


def _constant(view: View, value: float) -> Crafted:
    return Crafted(view.honest.new_full((view.byzantine, view.honest.shape[1]), value))
