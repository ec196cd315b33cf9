"""How attacks are configured and found by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from pydantic import ConfigDict

from trilemma.attacks.types import Attack
from trilemma.options import Options
from trilemma.registry import Registry

Promise = Literal["finite", "scale"]
"""What most attacks promise: messages are numbers, and a times as long where honest ones are."""


class AttackSettings(Options, ABC):
    """The settings of one attack: frozen, validated, and able to build it."""

    model_config = ConfigDict(allow_inf_nan=False)

    lacks: ClassVar[frozenset[Promise]] = frozenset()
    """What the attack does not promise, so that `trilemma.testing` does not ask for it."""

    @abstractmethod
    def build(self) -> Attack:
        """Return the attack these settings describe."""


attacks: Registry[type[AttackSettings]] = Registry("attack")
"""Every attack by the name configurations use."""
