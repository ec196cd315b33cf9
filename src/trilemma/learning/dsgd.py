"""DSGD and DP-DSGD: distributed SGD, with momentum, with or without clipping and Gaussian noise.

    θ ← θ − γ R(m_1, …, m_n),   m_i ← β m_i + (1−β) (clip(∇f_i(θ), C) + N(0, σ² I))

With the mean as the rule and no adversary this is the baseline every private and robust method is measured
against; without `[privacy]` it neither clips nor adds noise. The loop is in
`trilemma.learning.steps.momentum`.

Reference: Abadi et al., "Deep learning with differential privacy", CCS 2016 (per-example clip and noise).
"""

from __future__ import annotations

from trilemma.learning.settings import algorithms
from trilemma.learning.steps.momentum import MomentumSettings


@algorithms.register("dsgd")
class DSGD(MomentumSettings):
    """Distributed SGD with momentum; with [privacy]: DP-DSGD."""
