"""Noise test: each message on its own against the noise it must carry; `"noise-test+mean"`.

What the server does is in `trilemma.learning.defences.screens.noise_test`.
"""

from __future__ import annotations

from pydantic import Field

from trilemma.aggregation.steps.registry import mixings
from trilemma.aggregation.steps.stage import Stage


@mixings.register("noise-test")
class NoiseTestStage(Stage):
    """Leave out messages whose length, or distribution of coordinates, does not fit the agreed noise.

    Needs an algorithm that adds noise. Every client and every round is tested by itself.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("noise-test(level=0.01)+mean", f=1).name
    'noise-test(level=0.01)+mean'

    Reference: Xiang, Wang, Lin, Wang, "Practical differentially private and Byzantine-resilient federated
    learning", SIGMOD 2023, the first of its two stages.
    """

    deviations: float = Field(
        default=3.0, gt=0, description="standard deviations that a squared length may be off"
    )
    level: float = Field(
        default=0.05, gt=0, lt=1, description="level of the test of Kolmogorov and Smirnov on the numbers"
    )
