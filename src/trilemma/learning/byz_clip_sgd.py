"""Byz-Clip-SGD: clipped, noised gradients and a robust rule, without momentum.

    x ← x − γ RAgg(c_1, …, c_n),   c_i = clip_τ(∇f_i(x; ξ)) + ω_i,   ω_i ~ N(0, σ_ω² I)

Algorithm 3 of the Byz-Clip21 paper: the plain rival that error feedback and double momentum are measured
against. The loop is in `trilemma.learning.steps.momentum`, with momentum 0.
"""

from __future__ import annotations

from pydantic import Field

from trilemma.learning.byz_clip21 import order_of_magnitude_noise
from trilemma.learning.settings import algorithms
from trilemma.learning.steps.momentum import MomentumSettings
from trilemma.privacy.types import NoiseLaw, Release


@algorithms.register("byz-clip-sgd")
class ByzClipSGD(MomentumSettings):
    """Byz-Clip-SGD: clipped and noised gradients, a robust rule, no momentum."""

    momentum: float = Field(default=0.0, ge=0, le=0, description="none; safe-dshb has momentum")

    def paper_noise(self, release: Release, epsilon: float, delta: float, rounds: int) -> NoiseLaw:
        """Return the noise of the paper's formula; see `order_of_magnitude_noise`."""
        return order_of_magnitude_noise(release, epsilon, delta, rounds)
