"""What drawing noise costs a client, taken as a stage of its round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trilemma.base.stopwatch import Stopwatch
from trilemma.privacy.types import NoiseLaw, PiecewiseNoise


@dataclass(frozen=True)
class TimedNoise:
    """A noise source whose time is taken."""

    source: PiecewiseNoise
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

    def pieces(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int
    ) -> Iterator[NDArray[np.float64]]:
        """Draw whole steps from the source, piece by piece."""
        return self._timed(self.source.pieces(law, step, ids, dim, round_))

    def _timed(self, pieces: Iterator[NDArray[np.float64]]) -> Iterator[NDArray[np.float64]]:
        while True:
            with self.watch.stage("noise"):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece
