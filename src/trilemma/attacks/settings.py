"""How attacks are configured and found by name."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import ConfigDict

from trilemma.attacks.types import Attack
from trilemma.options import Options
from trilemma.registry import Registry


class AttackSettings(Options, ABC):
    """The settings of one attack: frozen, validated, and able to build it."""

    model_config = ConfigDict(allow_inf_nan=False)

    @abstractmethod
    def build(self) -> Attack:
        """Return the attack these settings describe."""


attacks: Registry[type[AttackSettings]] = Registry("attack")
"""Every attack by the name configurations use."""
