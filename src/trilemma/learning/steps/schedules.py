"""The learning rates and momenta of the theorems, as functions of the round.

With L the smoothness of the loss, μ its strong convexity, L₀ its initial gap and σ̄² the variance of Theorem
4.2 (`trilemma bounds` computes it):

    strongly convex   γ_t = 10 / (μ (t + 240 L/μ)),                       β_t = 1 − 24 L γ_t
    non-convex        γ   = min(1/(24 L), √(a₄ L₀) / (2 σ̄ √(a₃ L T))),    β   = 1 − 24 L γ

with a₃ = 5760, a₄ = 270. They are made for proofs and far more cautious than practice needs.

Reference: Allouah et al., "On the privacy-robustness-utility trilemma in distributed learning", ICML 2023,
Theorem 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

A3, A4 = 5760.0, 270.0
"""Constants of the schedule and the bound in the non-convex case."""

Schedule = Callable[[int], float]
"""A quantity that may change from round to round (counted from 0)."""


class _Theory(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    smoothness: float = Field(gt=0, description="L")

    def _momentum(self, lr: float) -> float:
        return 1.0 - 24.0 * self.smoothness * lr


class StronglyConvex(_Theory):
    """Decreasing steps for a strongly convex loss.

    >>> schedule = StronglyConvex(kind="strongly_convex", smoothness=1.0, convexity=0.1)
    >>> lr, beta = schedule.at(rounds=100)
    >>> f"{lr(0):.4f} {beta(0):.4f}", lr(50) < lr(0), beta(50) > beta(0)
    ('0.0417 0.0000', True, True)
    """

    kind: Literal["strongly_convex"]
    convexity: float = Field(gt=0, description="μ")

    def at(self, rounds: int) -> tuple[Schedule, Schedule]:
        """Return learning rate and momentum for a run of `rounds` rounds."""

        def lr(round_: int) -> float:
            return 10.0 / (self.convexity * (round_ + 240.0 * self.smoothness / self.convexity))

        return lr, lambda round_: self._momentum(lr(round_))


class NonConvex(_Theory):
    """A constant step that depends on the length of the run."""

    kind: Literal["non_convex"]
    gap: float = Field(gt=0, description="L₀, the initial loss above its infimum")
    noise: float = Field(gt=0, description="σ̄")

    def at(self, rounds: int) -> tuple[Schedule, Schedule]:
        """Return learning rate and momentum for a run of `rounds` rounds."""
        step = math.sqrt(A4 * self.gap) / (2.0 * self.noise * math.sqrt(A3 * self.smoothness * rounds))
        gamma = min(1.0 / (24.0 * self.smoothness), step)
        return lambda _: gamma, lambda _: self._momentum(gamma)


Theory = Annotated[StronglyConvex | NonConvex, Field(discriminator="kind")]
