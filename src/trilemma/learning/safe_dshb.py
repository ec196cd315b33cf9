"""SAFE-DSHB (an earlier version: SMEAL): per-example clipping, local noise, momentum, a robust rule.

    g_i = (1/b) Σ_j clip(∇ℓ(θ; x_j), C)
    m_i ← β m_i + (1−β) (g_i + N(0, σ_DP² I)),   σ_DP = (2C/b) σ_NM
    θ ← θ − γ F(m_1, …, m_n)

With `unit = "user"` the averaged gradient is clipped instead of each example's. That is the batch-clipped
variant to which the Byz-Clip21 paper compares its method, and also CafCor without correlated noise. The loop
is in `trilemma.learning.steps.momentum`.

Reference: Allouah, Guerraoui, Gupta, Pinot, Stephan, "On the privacy-robustness-utility trilemma in
distributed learning", ICML 2023, Algorithm 1.
"""

from __future__ import annotations

from pydantic import Field

from trilemma.learning.byz_clip21 import order_of_magnitude_noise
from trilemma.learning.settings import algorithms
from trilemma.learning.steps.momentum import MomentumSettings
from trilemma.privacy.types import NoiseLaw, Release, Unit


@algorithms.register("safe-dshb")
class SafeDSHB(MomentumSettings):
    """SAFE-DSHB: per-example clip, local noise, momentum, any robust rule (ICML 2023)."""

    momentum: float = Field(default=0.99, ge=0, lt=1, description="momentum β")
    unit: Unit = Field(default="example", description="clip per example, or per client (batch-clipped)")

    def paper_noise(self, release: Release, epsilon: float, delta: float, rounds: int) -> NoiseLaw:
        """Return the noise that the Byz-Clip21 paper uses for the batch-clipped variant."""
        return order_of_magnitude_noise(release, epsilon, delta, rounds)
