"""RSA: personal models tied to a global one by an ℓ_p norm, so that one liar's pull is bounded.

    F_k(w) = min_x f_k(x) + λ ‖w − x‖_p,   p ≥ 1

This is RSA as run in lp-proj's experiments: per round a client does R solves, each followed by a step of its
copy of w, and the server averages the copies. With R = 1 and p = 1 the server's step is

    w ← w − η_l λ mean_k sign(w − x_k)

The original's server-side regulariser is left out. The loop is in `trilemma.learning.personal.bilevel`.

Reference: Li, Xu, Chen, Giannakis, Ling, "RSA: Byzantine-robust stochastic aggregation methods for
distributed learning from heterogeneous datasets", AAAI 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from trilemma.learning.personal.bilevel import BilevelSettings, Coupling, bilevel_algorithm, lenient, norm
from trilemma.learning.protocol import Algorithm
from trilemma.learning.settings import Setup, algorithms


@algorithms.register("rsa")
class RSA(BilevelSettings):
    """RSA: personal models tied to a global one by an ℓ_p norm."""

    smooth: ClassVar[Mapping[str, Any]] = {"p": 2}

    p: float = Field(default=1.0, ge=1, allow_inf_nan=True, description="the norm of the penalty")
    nonfinite: Literal["drop", "star"] = Field(
        default="drop", description="w not finite: drop that coordinate's penalty, or let the run diverge"
    )

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        penalty = lenient(norm(self.p), self.nonfinite)
        coupling = Coupling(penalty, self.weight_decay, tolerates=self.nonfinite == "drop")
        return bilevel_algorithm("rsa", self, coupling, setup)
