"""Byz-SGDM: momentum at the clients and a robust rule, without privacy.

    v_i ← (1−β) v_i + β ∇f_i(x; ξ),   x ← x − γ RAgg(v_1, …, v_n)

Algorithm 2 of the Byz-Clip21 paper: what Byz-Clip21-SGD2M becomes at τ = ∞, β̂ = 1. The loop is in
`trilemma.learning.steps.momentum`, whose momentum is 1 − β.

Reference: Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trilemma.learning.settings import AlgorithmSettings, algorithms
from trilemma.learning.steps.momentum import MomentumSettings
from trilemma.privacy.types import Unit


@algorithms.register("byz-sgdm")
class ByzSGDM(MomentumSettings):
    """Byz-SGDM: client momentum and a robust rule, no privacy (ICML 2021)."""

    momentum: float = Field(default=0.9, ge=0, lt=1, description="1 − β")
    # No options: they would say what privacy protects.
    unit: ClassVar[Unit] = "user"  # type: ignore[misc]
    sampling: ClassVar = "without-replacement"  # type: ignore[misc]

    exposure = AlgorithmSettings.exposure  # it neither clips nor adds noise
