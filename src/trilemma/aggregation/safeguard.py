"""Safeguard: clients whose sums of messages drift away from the others'; `"safeguard+mean"`.

What the server does is in `trilemma.learning.defences.screens.safeguard`.
"""

from __future__ import annotations

from pydantic import Field

from trilemma.aggregation.steps.registry import mixings
from trilemma.aggregation.steps.stage import Stage


@mixings.register("safeguard")
class SafeguardStage(Stage):
    """Leave out for good the clients whose summed messages lie far from those of the majority.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("safeguard(window=50)+mean", f=1).name
    'safeguard(window=50)+mean'

    Reference: Allen-Zhu, Ebrahimian, Li, Alistarh, "Byzantine-resilient non-convex stochastic gradient
    descent", ICLR 2021, with one safeguard.
    """

    window: int = Field(default=0, ge=0, description="rounds after which sums begin anew; 0: never")
    factor: float = Field(
        default=1.5, ge=1, description="how far a sum may lie from the central one, in its distances to most"
    )
