"""Filter: directions of large variance lose weight until the covariance is under a known bound.

The reweighting of CAF with a known bound σ0² on the top eigenvalue of the honest covariance: stop at the
first step with σ_c² ≤ η σ0², η = 2n(n−f)/(n−2f)². (The papers print this test the wrong way round.) Where
no step gets there, always so for σ0² = 0, the answer is the last step whose weight Σc exceeds n − 2f, as in
CAF: going on would remove every message.

Reference: Diakonikolas et al., "Being robust (in high dimensions) can be practical", ICML 2017; this form:
Allouah et al., "On the privacy-robustness-utility trilemma in distributed learning", ICML 2023, Appendix B.2.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.passes.spectral import reweightings
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Geometric
from trilemma.aggregation.steps.types import Criterion, Weighing


@rules.register("filter")
class Filter(Geometric):
    """Filter out directions of large variance until it is under a known bound σ0².

    Proposition B.1: ‖value − mean_S‖² ≤ κ σ0² for every S of n − f messages with λ_max(Cov_S) ≤ σ0² =
    `bound`, κ = 6f/(n−2f) · (1 + f/(n−2f)) (spectral criterion, with σ0² in place of λ_max). For σ0² = 0
    none is known.

    Cost: two reads of X and at most 2f top eigenpairs. `info.objective` is σ_c² of the answer.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> X = torch.tensor([[1.0], [2.0], [3.0], [1000.0]])
    >>> out = agg.filter(f=1, bound=1.0)(X)
    >>> round(out.value.item(), 2), out.info.iterations
    (2.0, 2)
    """

    bound: float = Field(default=0.0, ge=0, description="σ0², a bound on the honest covariance")
    criterion: ClassVar[Criterion] = "spectral"
    weighs: ClassVar[bool] = True

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return the weights of the first step that is under the bound."""
        liars, total = geometry.counted(f)
        enough = 2 * total * (total - liars) / (total - 2 * liars) ** 2 * self.bound
        last, variance, count = geometry.masses, None, 0
        for step in reweightings(geometry, above=total - 2 * liars):
            last, variance, count = step.c, step.variance, count + 1
            if variance <= enough:
                break
        return Weighing(last / last.sum(), iterations=count, objective=variance)

    def kappa(self, n: int) -> float | None:
        """Return 6f/(n−2f) · (1 + f/(n−2f)), which bounds the error by κ σ0²; None where σ0² = 0."""
        self.check(n)
        f, total = self.counted(n)
        ratio = f / (total - 2 * f)
        return 6 * ratio * (1 + ratio) if self.bound > 0 or self.f == 0 else None
