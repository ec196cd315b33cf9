"""lp-proj: personal models that agree only after a random projection to a few dimensions.

    lp-proj-2:   F_k(w) = min_x f_k(x) + (λ/2) ‖w − P x‖₂²
    lp-proj-1:   F_k(w) = min_x f_k(x) +  λ    ‖w − P x‖₁

with w ∈ R^d and P ∈ R^{d×D} fixed; clients share the seed of P. Only w is exchanged: d numbers instead of D,
in both directions. With p = 1, w acts on a client's model only through a sign, so a liar's message pulls no
harder than an honest one, however large it is.

The loop is in `trilemma.learning.personal.bilevel`, P in `trilemma.models.coordinates.projection`.

Reference: Lin, Han, Li, Zhang, "Personalized federated learning towards communication efficiency, robustness
and fairness", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.learning.personal.bilevel import (
    BilevelSettings,
    Coupling,
    bilevel_algorithm,
    lenient,
    norm,
    squared,
)
from trilemma.learning.protocol import Algorithm
from trilemma.learning.settings import Setup, algorithms
from trilemma.learning.steps.presets import Preset, switches
from trilemma.models.coordinates.projection import Kind, Projection, projection
from trilemma.models.types import Model


@algorithms.register("lp-proj")
class LpProj(BilevelSettings):
    """lp-proj: personal models tied to a common vector in a few random dimensions.

    >>> LpProj(dim=21).p, LpProj(dim=21, p=2).projection
    (1, 'gaussian')
    """

    smooth: ClassVar[Mapping[str, Any]] = {"p": 2}

    p: Literal[1, 2] = Field(default=1, description="norm of the penalty: 1, or 2 (squared)")
    dim: int = Field(default=21, ge=1, description="projected dimension (d_sub)")
    projection: Kind = Field(default="gaussian", description="rows of P: gaussian, orthonormal, identity")
    preset: Preset = Field(default="correct", description="correct, or as the authors' code behaves")
    memory: int = Field(default=2 << 30, ge=0, description="bytes up to which P is stored, not redrawn")
    nonfinite: Literal["drop", "star"] = Field(
        default="drop", description="p = 1, w not finite: drop that penalty, or let the run diverge"
    )

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        drop = self.p == 1 and self.nonfinite == "drop"
        decays = self.p == 2 or switches(self.preset).decay_in_l1
        coupling = Coupling(
            project=self._project,
            size=self._size,
            start=self._start,
            penalty=squared if self.p == 2 else lenient(norm(1.0), self.nonfinite),
            decay=self.weight_decay if decays else 0.0,
            tolerates=drop,
        )
        return bilevel_algorithm("lp-proj", self, coupling, setup)

    def _project(self, model: Model, seed: int, device: torch.device) -> Projection:
        return projection(self.projection, self.dim, model.dim, seed, memory=self.memory, device=device)

    def _size(self, model: Model) -> int:
        return model.dim if self.projection == "identity" else self.dim

    def _start(self, model: Model, key: Key) -> Tensor:
        return torch.zeros(self._size(model))
