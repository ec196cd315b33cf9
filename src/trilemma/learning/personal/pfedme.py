"""pFedMe: personal models as Moreau envelopes around a global one.

    F_k(w) = min_x f_k(x) + (λ/2) ‖w − x‖₂²

lp-proj-2 with P = I, started from a model instead of zeros. The loop is in
`trilemma.learning.personal.bilevel`.

Reference: Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020.
"""

from __future__ import annotations

from trilemma.learning.personal.bilevel import BilevelSettings, Coupling, bilevel_algorithm, squared
from trilemma.learning.protocol import Algorithm
from trilemma.learning.settings import Setup, algorithms


@algorithms.register("pfedme")
class PFedMe(BilevelSettings):
    """pFedMe: personal models tied to a global one by a squared distance."""

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        return bilevel_algorithm("pfedme", self, Coupling(squared, self.weight_decay), setup)
