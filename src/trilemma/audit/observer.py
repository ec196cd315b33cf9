"""What a threat model leaves to an observer: which noise it can remove, and what variance stays.

A client's release is c + v_0, its partners' noise v_1 … v_{N−1} is known up to what they drew for themselves.
Given all of it, the best estimate of c is a single residual,

    R = c + v_0 + w Σ_j v_j,        Var R = v,

| threat          | N       | w                            | v                                             |
|-----------------|---------|------------------------------|-----------------------------------------------|
| ldp             | 1       |                              | σ_ind²                                        |
| secldp, byzldp  | n − q   | (Σ⁻¹)_01/(Σ⁻¹)_00            | 1/(Σ⁻¹)_00                                    |
| cdp             | n − f   | 1: the sum is all that shows | N σ_ind²                                      |

with Σ the covariance of `trilemma.privacy.threats.covariance` among the N; colluders are not among them, for
their shares are known and taken off. That is the certificate's own worst case: everybody else is honest and
sends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trilemma.audit.trials import TrialNoise
from trilemma.privacy.threats.catalogue import Threat
from trilemma.privacy.threats.covariance import SecretGraph, covariance
from trilemma.privacy.types import NoiseLaw

_NOTHING = 1e-12
"""What stands for a variance of zero, in units of the noise's."""


@dataclass(frozen=True)
class AuditObserver:
    """An observer of the audited client and its partners.

    >>> AuditObserver.of(Threat("ldp", 9), NoiseLaw(2.0))
    AuditObserver(members=1, weight=0.0, variance=4.0)
    >>> seen = AuditObserver.of(Threat("secldp", 9), NoiseLaw(0.5, 1.0))
    >>> seen.members, round(seen.weight, 3), round(seen.variance, 3)
    (9, 0.8, 1.85)
    """

    members: int
    weight: float
    variance: float

    @classmethod
    def of(cls, threat: Threat, law: NoiseLaw) -> AuditObserver:
        """Return the observer of a threat model."""
        own, shared = law.sigma_ind**2, law.sigma_cor**2
        least = _NOTHING * max(own, shared)
        if threat.model.central:
            return cls(threat.honest, 1.0, max(threat.honest * own, least))
        members = threat.clients - threat.collusion
        if not threat.model.shares or shared == 0 or members == 1:
            return cls(1, 0.0, max(own, least))
        if own == 0:
            return cls(members, 1.0, least)
        precision = np.linalg.inv(covariance(SecretGraph.complete(members), law, range(members)))
        return cls(members, float(precision[0, 1] / precision[0, 0]), float(1 / precision[0, 0]))

    def residual(self, releases: Tensor, noise: TrialNoise) -> Tensor:
        """Return R for releases (T, k, d); `noise` knows what the others drew, if anybody asked it."""
        heard = [noise.others.get(t, torch.zeros_like(one)) for t, one in enumerate(releases)]
        return releases + self.weight * torch.stack(heard)
