"""CAF, the covariance-bound agnostic filter.

    c = 1; best = (mean, ∞)
    while Σc > n − 2f:
        μ_c, Σ_c       weighted mean and covariance;   (σ_c², v) the top eigenpair of Σ_c
        if σ_c ≤ best σ: best = (μ_c, σ_c)
        τ_i = ⟨v, x_i − μ_c⟩²;   c_i ← c_i (1 − τ_i / max_j τ_j)
    return best μ

At least one weight reaches zero in every step, so there are at most 2f steps. All of it happens in the n×n
Gram matrix with the exact top eigenpair; no power iterations in d dimensions.

Where clients have public weights w, c starts from w and the walk ends at 1 − 2W, W the weight of the f
heaviest. It then takes at most as many steps as light clients weigh 2W, which may be many more than 2f.

Reference: Allouah, Guerraoui, Stephan, "Towards trustworthy federated learning with untrusted participants",
ICML 2025, Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from trilemma.aggregation.passes import many
from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.passes.spectral import reweightings
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Geometric
from trilemma.aggregation.steps.types import Criterion, Weighing
from trilemma.base.recordings import filled_up


@rules.register("caf")
class Caf(Geometric):
    """Filter out directions of large variance; needs only f, no bound on the covariance.

    Proposition 4.1: for every S of n − f messages, ‖value − mean_S‖² ≤ κ λ_max(Cov_S) with
    κ = 6f/(n−f) · (1 + f/(n−2f))². (Spectral criterion: λ_max, not the trace.) With weights: for every S of
    weight ≥ 1 − W, its weighted mean and covariance, κ_w = 6W/(1−W) · (1 + W/(1−2W))². The paper's proof
    passes over answers after the first good step; that of docs/concepts/weights.md covers them.

    Cost: two reads of X and at most 2f top eigenpairs of n×n matrices. `info.objective` is σ_c² of the
    answer, `info.iterations` the number of steps.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> X = torch.tensor([[1.0], [2.0], [3.0], [1000.0]])
    >>> out = agg.caf(f=1)(X)
    >>> round(out.value.item(), 2), out.weights[3].item(), out.info.iterations
    (2.0, 0.0, 2)
    """

    criterion: ClassVar[Criterion] = "spectral"
    weighs: ClassVar[bool] = True

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return the weights c / Σc of the step with the smallest top eigenvalue."""
        best, smallest, count = geometry.masses, math.inf, 0
        liars, everybody = geometry.counted(f)
        for step in reweightings(geometry, above=everybody - 2 * liars):
            count += 1
            if step.variance <= smallest:
                best, smallest = step.c, step.variance
        return Weighing(best / best.sum(), iterations=count, objective=smallest if count else None)

    @property
    def weights_from_grams(self) -> Callable[[Tensor], Tensor] | None:
        """See `Rule.weights_from_grams`."""
        return None if self.weights else self._weigh_many

    def _weigh_many(self, grams: Tensor) -> Tensor:
        """Take the walk for every one of (B, n, n)."""
        n = grams.shape[-1]
        self.check(n)
        best = many.walked(filled_up(grams.double()), above=n - 2 * self.f)
        return (best / best.sum(1, keepdim=True))[: len(grams)]

    def kappa(self, n: int) -> float:
        """Return κ of Proposition 4.1; with weights κ_w."""
        self.check(n)
        f, total = self.counted(n)
        return 6 * f / (total - f) * (1 + f / (total - 2 * f)) ** 2
