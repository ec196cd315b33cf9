"""How attacks are configured and found by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from trilemma.attacks.types import Attack
from trilemma.base.options import Options
from trilemma.base.registry import Registry

Promise = Literal["finite", "scale"]
"""What most attacks promise: "finite" messages; and "scale": they grow in proportion to the honest ones."""


class AttackSettings(Options, ABC):
    """The settings of one attack: frozen, validated, and able to build it."""

    lacks: ClassVar[frozenset[Promise]] = frozenset()
    """What the attack does not promise; `trilemma.testing` does not test it then."""

    @abstractmethod
    def build(self) -> Attack:
        """Return the attack these settings describe."""


attacks: Registry[type[AttackSettings]] = Registry("attack")
"""Every attack by the name configurations use."""
