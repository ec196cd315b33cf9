"""CafCor: noise that cancels between clients, and a rule (CAF) that needs no bound on their spread.

    g_i = clip((1/b) Σ_j ∇ℓ(θ; x_j), C)
    m_i ← β m_i + (1−β) (g_i + v̄_i + Σ_{j≠i} v_ij)
    θ ← θ − γ CAF(m_1, …, m_n)

where v̄_i ~ N(0, σ_ind² I) is client i's own noise, and v_ij = −v_ji ~ N(0, σ_cor² I) is shared with client j
and unknown to the server. Shared noise cancels in the sum over all clients, so the mean has little noise
although every single message has much. The threat model ([privacy] threat: cdp, secldp, byzldp, ldp) says
who knows which secrets. The loop is in `trilemma.learning.steps.momentum`; the noise comes from
`clients.noise`.

Reference: Allouah, Guerraoui, Stephan, "Towards trustworthy federated learning with untrusted participants",
ICML 2025, Algorithm 1.
"""

from __future__ import annotations

from pydantic import Field

from trilemma.learning.settings import algorithms
from trilemma.learning.steps.momentum import MomentumSettings


@algorithms.register("cafcor")
class CafCor(MomentumSettings):
    """CafCor: clipped gradients, correlated noise, momentum; made for the rule caf (ICML 2025)."""

    momentum: float = Field(default=0.85, ge=0, lt=1, description="momentum β")
    batch_size: int = Field(default=50, ge=1, description="examples b per client and round")
