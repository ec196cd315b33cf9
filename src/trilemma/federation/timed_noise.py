"""What drawing noise costs a client, taken as a stage of its round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trilemma.privacy.types import NoiseLaw, NoiseSource
from trilemma.stopwatch import Stopwatch


@dataclass(frozen=True)
class TimedNoise:
    """A noise source whose time is taken."""

    source: NoiseSource
    watch: Stopwatch

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> torch.Tensor:
        """Draw from the source."""
        with self.watch.stage("noise"):
            return self.source.draw(law, ids, dim, round_, device)

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> torch.Tensor:
        """Draw whole steps from the source."""
        with self.watch.stage("noise"):
            return self.source.steps(law, step, ids, dim, round_, device)
