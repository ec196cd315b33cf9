"""The objectives that calibration may minimise, by name: the noise in the honest mean, or a theorem's bound.

`theorem` is the noise part of σ̄² in Theorem 4.2 of the CafCor paper (Allouah, Guerraoui, Stephan, ICML 2025)
for large d: (f σ_cor² + σ_ind²) + 432 κ (n σ_cor² + σ_ind²) up to a factor, with κ of CAF. Its constant 432
comes from a covering argument. It weighs σ_cor² so heavily that the minimum is local noise only, unless few
clients in a hundred are Byzantine. That is a property of the bound, not of the algorithm.
"""

from __future__ import annotations

from trilemma.aggregation.caf import Caf
from trilemma.base.registry import Registry
from trilemma.privacy import Objective, Price, Threat, honest_mean

objectives: Registry[Objective] = Registry("objective")
"""Every objective by the name users type."""

objectives.register("honest-mean")(honest_mean)


@objectives.register("theorem")
def cafcor_theorem(threat: Threat) -> Price:
    """The noise part of σ̄² in CafCor's Theorem 4.2.

    >>> cafcor_theorem(Threat("secldp", clients=100, byzantine=10))
    Price(cor=36460.0, ind=365.5)
    """
    n, f = threat.clients, threat.byzantine
    heavy = 432 * Caf(f=f).kappa(n)
    return Price(f + heavy * n, 1 + heavy)
