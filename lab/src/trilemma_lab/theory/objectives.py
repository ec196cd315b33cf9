"""An objective that calibration may minimise instead of the noise in the honest mean: a theorem's bound.

It is the noise part of σ̄² in Theorem 4.2 of the CafCor paper (Allouah, Guerraoui, Stephan, ICML 2025) for
large d: (f σ_cor² + σ_ind²) + 432 κ (n σ_cor² + σ_ind²) up to a factor, with κ of CAF. Its constant 432 comes
from a covering argument. It weighs σ_cor² so heavily that the minimum is local noise only, unless few clients
in a hundred are Byzantine. That is a property of the bound, not of the algorithm.
"""

from __future__ import annotations

from trilemma.aggregation.caf import Caf
from trilemma.privacy.accounting.calibration import Price
from trilemma.privacy.threats.catalogue import Threat


def cafcor_theorem(threat: Threat) -> Price:
    """The noise part of σ̄² in CafCor's Theorem 4.2: `calibrate(…, objective=cafcor_theorem)`.

    >>> cafcor_theorem(Threat("secldp", clients=100, byzantine=10))
    Price(cor=36460.0, ind=365.5)
    """
    n, f = threat.clients, threat.byzantine
    heavy = 432 * Caf(f=f).kappa(n)
    return Price(f + heavy * n, 1 + heavy)
