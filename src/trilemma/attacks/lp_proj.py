"""The four attacks of lp-proj: Byzantine clients send constants, noise, or their message out of scale.

With m_k the message client k would have sent, and a fresh draw for every client and round:

    same-value    b_k = c · 1,       c ~ N(0, τ²),   τ = 100
    scaled-flip   b_k = −|c| m_k,    c ~ N(0, τ²),   τ = 10
    gaussian      b_k = z,           z ~ N(0, τ² I), τ = 100
    data-poison   b_k = c m_k,       c ~ N(0, τ²),   τ = 20,  and client k trains on uniformly random labels

τ is the strength. The authors' code seeds a generator with the round's number before it draws the magnitudes
c, so that these repeat over methods and seeds of a run; `draws="round"` does the same.

Reference: Lin, Han, Li, Zhang, "Personalized federated learning towards communication efficiency, robustness
and fairness", NeurIPS 2022, and its code.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trilemma.attacks.labels import scramble
from trilemma.attacks.settings import AttackSettings, Promise, attacks
from trilemma.attacks.types import Attack, Crafted, View
from trilemma.base.errors import UserError


class Magnitudes(AttackSettings):
    """Attacks that draw one magnitude c ~ N(0, strength²) for every Byzantine client and round."""

    strength: float = Field(ge=0.0)
    """Standard deviation τ of the magnitude."""
    draws: Literal["key", "round"] = "key"
    """Draw from the key of the run, or, as the authors' code does, from the number of the round."""

    def _draw(self, view: View) -> Tensor:
        """Return the magnitudes (f, 1)."""
        if self.draws == "round":
            # The authors' code uses this legacy generator, as a global one.
            drawn = np.random.RandomState(view.round).normal(0.0, self.strength, view.byzantine)
        else:
            drawn = view.key.fold("magnitude").numpy().normal(0.0, self.strength, view.byzantine)
        return torch.as_tensor(drawn, dtype=view.honest.dtype, device=view.honest.device).unsqueeze(1)


@attacks.register("same-value")
class SameValue(Magnitudes):
    """Same value: every coordinate the same random number, fresh for every client and round."""

    lacks: ClassVar[frozenset[Promise]] = frozenset({"scale"})

    strength: float = Field(default=100.0, ge=0.0)
    """Standard deviation τ of the magnitude."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("same-value", craft=self._craft)

    def _craft(self, view: View) -> Crafted:
        return Crafted(self._draw(view).expand(-1, view.honest.shape[1]), self.strength)


@attacks.register("scaled-flip")
class ScaledFlip(Magnitudes):
    """Scaled flip: each client's own message, its sign flipped, times a random magnitude."""

    strength: float = Field(default=10.0, ge=0.0)
    """Standard deviation τ of the magnitude."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("scaled-flip", craft=self._craft, reads_own=True)

    def _craft(self, view: View) -> Crafted:
        return Crafted(-self._draw(view).abs() * _own(view, "scaled-flip"), self.strength)


@attacks.register("gaussian")
class Gaussian(AttackSettings):
    """Gaussian: pure noise of standard deviation τ, fresh for every client and round."""

    lacks: ClassVar[frozenset[Promise]] = frozenset({"scale"})

    strength: float = Field(default=100.0, ge=0.0)
    """Standard deviation τ of the noise."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("gaussian", craft=self._craft)

    def _craft(self, view: View) -> Crafted:
        shape = (view.byzantine, view.honest.shape[1])
        # Drawn on the CPU, so that a key gives the same noise on every device.
        noise = torch.randn(shape, generator=view.key.fold("noise").torch()) * self.strength
        return Crafted(noise.to(view.honest), self.strength)


@attacks.register("data-poison")
class DataPoison(Magnitudes):
    """Data poisoning: random labels, and the message times a random factor."""

    strength: float = Field(default=20.0, ge=0.0)
    """Standard deviation τ of the magnitude."""

    def build(self) -> Attack:
        """Return the attack."""
        return Attack("data-poison", craft=self._craft, poison=scramble, reads_own=True)

    def _craft(self, view: View) -> Crafted:
        return Crafted(self._draw(view) * _own(view, "data-poison"), self.strength)


def _own(view: View, name: str) -> Tensor:
    if view.own is None:
        raise UserError(
            f"attack {name!r} rescales what Byzantine clients would have sent, so it needs View.own (f, d)"
        )
    return view.own
