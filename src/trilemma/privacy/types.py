"""The vocabulary of the privacy room: what is released, under which threat, with which noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Unit = Literal["user", "example"]
ThreatName = Literal["cdp", "secldp", "byzldp", "ldp"]


@dataclass(frozen=True)
class NoiseLaw:
    """Gaussian noise of the honest clients: N(0, σ_ind² I) each, and ±N(0, σ_cor² I) per pair."""

    sigma_ind: float = 0.0
    sigma_cor: float = 0.0


class NoiseSource(Protocol):
    """Where clients' noise comes from: a simulation's keys, or the secrets of a real federation."""

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the noise (k, dim) that clients `ids` add in round `round_`, float32."""


@dataclass(frozen=True)
class Sampling:
    """How a batch is drawn from a client's m examples: not at all, Poisson, or without replacement."""

    scheme: Literal["none", "poisson", "without_replacement"] = "none"
    rate: float = 1.0


@dataclass(frozen=True)
class Release:
    """What one client lets out in one round, as far as privacy is concerned.

    `clip` bounds a unit's contribution to the message; for unit "example" the contribution is averaged over
    `batch` examples, so replacing the unit moves the message by 2·clip (user) or 2·clip/batch (example).
    """

    clip: float
    law: NoiseLaw
    unit: Unit = "user"
    batch: int = 1
    sampling: Sampling = Sampling()

    @property
    def sensitivity(self) -> float:
        """Largest move of the message when the unit is replaced."""
        return 2.0 * self.clip / (self.batch if self.unit == "example" else 1)
