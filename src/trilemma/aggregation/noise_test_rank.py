"""The noise test, then a ranking by the server's own message; `"noise-test-rank+mean"`.

What the server does is in `trilemma.learning.defences.screens.noise_test_rank`.
"""

from __future__ import annotations

from pydantic import Field

from trilemma.aggregation.noise_test import NoiseTestStage
from trilemma.aggregation.steps.registry import mixings


@mixings.register("noise-test-rank")
class NoiseTestRankStage(NoiseTestStage):
    """The noise test, then the n − f clients that over rounds agree most with the server's own message.

    Needs public examples at the server, as `fltrust` does: `[aggregation] root = 100`.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("noise-test-rank(momentum=0.9)+mean", f=1).name
    'noise-test-rank(momentum=0.9)+mean'

    Reference: Xiang, Wang, Lin, Wang, "Practical differentially private and Byzantine-resilient federated
    learning", SIGMOD 2023, both stages.
    """

    momentum: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="how much of the server's own direction stays from round to round",
    )
