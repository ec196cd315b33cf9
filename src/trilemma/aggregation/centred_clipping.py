"""Centred clipping: deviations from a moving centre count up to a radius.

    v ← v + (1/n) Σ_i (x_i − v) · min(1, radius / ‖x_i − v‖),   repeated `steps` times from v = 0.

In weights: with s_i = min(1, radius/‖x_i − v‖) and v = Σ w_i x_i, the step is w ← (1 − mean s) w + s/n.

Reference: Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from trilemma.aggregation.mixing import shrinkage
from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Geometric, Promise
from trilemma.aggregation.steps.types import Weighing


@rules.register("cc")
class CentredClipping(Geometric):
    """Average clipped deviations from a moving centre that starts at 0.

    To start at a point v, such as the last aggregate, shift: `v + cc(f=f, radius=radius)(X - v).value`. f
    only says how many messages that are not finite may be left out. No κ. Cost: two reads of X.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.cc(f=1, radius=1.0, steps=1)(torch.tensor([[0.5], [0.25], [900.0]])).value
    tensor([0.5833])
    """

    lacks: ClassVar[frozenset[Promise]] = frozenset({"translation", "scale", "range"})

    radius: float = Field(default=10.0, gt=0, description="the longest deviation that counts in full")
    steps: int = Field(default=3, ge=1, description="how often the centre moves")

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return the weights after all steps; they sum to less than one while v is on its way from 0."""
        weights = np.zeros(geometry.n)
        for _ in range(self.steps):
            shrink = shrinkage(geometry.spread(weights), self.radius)
            weights = (1.0 - shrink.mean()) * weights + shrink / geometry.n
        return Weighing(weights, iterations=self.steps)

    def kappa(self, n: int) -> float | None:
        """Return None: how far clipping moves the value depends on the radius and the start."""
        self.check(n)
        return None
