"""Stages: steps of a chain that need more than one round's messages, and are the server's work.

A mixing step sees a round's messages and nothing else. A stage is named before a rule likewise, as in
`"evidence+mean"`, but what it does takes memory, knowledge of the noise, or public examples: the server does
it, in `trilemma.learning`. Of one round's messages alone it knows nothing, and leaves them as they are.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.chain import Mixing
from trilemma.aggregation.steps.types import Array
from trilemma.base.keys import Key


class Stage(Mixing):
    """A step that the server takes, before the rule; messages alone pass through it unchanged."""

    passes: ClassVar[bool] = True

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return the identity."""
        return np.eye(geometry.n)

    def kappa(self, after: float, n: int) -> float | None:
        """Messages pass through: the κ of what comes after."""
        return after
