"""Centred clipping (Karimireddy, He, Jaggi, ICML 2021).

    v ← v + (1/n) Σ_i (x_i − v) · min(1, radius / ‖x_i − v‖),   repeated `steps` times from v = 0.

In weights: with s_i = min(1, radius/‖x_i − v‖) and v = Σ w_i x_i, the step is w ← (1 − mean s) w + s/n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trilemma.aggregation.gram import Geometry
from trilemma.aggregation.mixing import shrinkage
from trilemma.aggregation.registry import rules
from trilemma.aggregation.rule import Geometric
from trilemma.aggregation.types import Weighing
from trilemma.errors import UserError


@dataclass(frozen=True)
class CentredClipping(Geometric):
    """Clipping around a moving centre; see `cc`."""

    radius: float = 10.0
    steps: int = 3
    label: ClassVar[str] = "cc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.radius, int | float) or not self.radius > 0:
            raise UserError(f"cc: the radius must be a number > 0; got {self.radius!r}")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise UserError(f"cc: steps must be a whole number ≥ 1; got {self.steps!r}")

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


@rules.register("cc")
def cc(f: int, radius: float = 10.0, steps: int = 3) -> CentredClipping:
    """Average clipped deviations from a moving centre that starts at 0.

    To start at a point v, such as the last aggregate, shift: `v + cc(f, radius)(X - v).value`. f only says
    how many messages that are not finite may be left out. No κ. Cost: two reads of X.

    >>> import torch
    >>> cc(f=1, radius=1.0, steps=1)(torch.tensor([[0.5], [0.25], [900.0]])).value
    tensor([0.5833])
    """
    return CentredClipping(f, radius, steps)
