"""What theory promises: the papers' error bounds, and the noise they would choose.

κ, how far Byzantine clients can move a rule's value, comes from the rules themselves (`Rule.kappa`).

>>> from trilemma.privacy import NoiseLaw
>>> problem = Problem(dim=69, heterogeneity=Heterogeneity(g=1.0, g_cov=1.0))
>>> round(rule_bounds("caf", problem, NoiseLaw(), clients=7, byzantine=2, rounds=400).kappa, 2)
6.67
"""

from trilemma_lab.theory.bounds import (
    Heterogeneity,
    Lower,
    Problem,
    Upper,
    error_term,
    lower_bound,
    non_convex_bound,
    strongly_convex_bound,
)
from trilemma_lab.theory.byz_clip21 import Neighbourhood, clipped_order, momentum_bound
from trilemma_lab.theory.objectives import cafcor_theorem
from trilemma_lab.theory.rules import Promise, rule_bounds

__all__ = [
    "Heterogeneity",
    "Lower",
    "Neighbourhood",
    "Problem",
    "Promise",
    "Upper",
    "cafcor_theorem",
    "clipped_order",
    "error_term",
    "lower_bound",
    "momentum_bound",
    "non_convex_bound",
    "rule_bounds",
    "strongly_convex_bound",
]
