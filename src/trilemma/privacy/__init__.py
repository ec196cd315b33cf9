"""The privacy room: noise and what it guarantees.

A `Release` says what one client lets out in a round, a `Threat` who may see it. `spent` gives ε by each
accountant, `calibrate` the least noise for an ε, `SimulatedNoise` draws it.

>>> threat = Threat("secldp", clients=100, byzantine=10)
>>> law = calibrate(epsilon=10, delta=1e-5, rounds=100, clip=1.0, threat=threat)
>>> cost = spent(Release(clip=1.0, law=law), threat, rounds=100, delta=1e-5, accountants=("exact",))
>>> round(cost.epsilon["exact"], 6)
10.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trilemma.base.on_demand import on_demand

if TYPE_CHECKING:
    from trilemma.privacy.accounting.calibration import calibrate, honest_mean, plan
    from trilemma.privacy.accounting.spending import certified_curve, spent
    from trilemma.privacy.mechanism import Mechanism, mechanism, multiplier
    from trilemma.privacy.noise.simulated import Noiseless, SimulatedNoise
    from trilemma.privacy.secrets import SecretNoise
    from trilemma.privacy.threats.catalogue import Threat
    from trilemma.privacy.threats.covariance import SecretGraph, covariance, mean_noise
    from trilemma.privacy.types import NoiseLaw, Release, Sampling
    from trilemma.privacy.verdict import Guarantee, NoGuarantee, Verdict, judge, read_verdict

__all__ = [
    "Guarantee",
    "Mechanism",
    "NoGuarantee",
    "NoiseLaw",
    "Noiseless",
    "Release",
    "Sampling",
    "SecretGraph",
    "SecretNoise",
    "SimulatedNoise",
    "Threat",
    "Verdict",
    "calibrate",
    "certified_curve",
    "covariance",
    "honest_mean",
    "judge",
    "mean_noise",
    "mechanism",
    "multiplier",
    "plan",
    "read_verdict",
    "spent",
]

on_demand(
    __name__,
    __all__,
    [
        "accounting.calibration",
        "accounting.spending",
        "mechanism",
        "noise.simulated",
        "secrets",
        "threats.catalogue",
        "threats.covariance",
        "types",
        "verdict",
    ],
)
