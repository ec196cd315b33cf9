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

from trilemma.on_demand import on_demand

if TYPE_CHECKING:
    from trilemma.privacy.accountants import Accountant
    from trilemma.privacy.accounting import (
        Spending,
        certified,
        certified_curve,
        composed_delta,
        composed_epsilon,
        epsilon_curve,
        spent,
        spent_delta,
    )
    from trilemma.privacy.calibration import (
        Objective,
        Plan,
        Price,
        allocate,
        calibrate,
        default_accountant,
        honest_mean,
        plan,
        required_multiplier,
    )
    from trilemma.privacy.covariance import (
        SecretGraph,
        bound_multiplier,
        complete_multiplier,
        covariance,
        mean_noise,
        multipliers,
        worst_multiplier,
    )
    from trilemma.privacy.ledger import BudgetExceeded, Ledger
    from trilemma.privacy.ledger_lines import Budget, LedgerError
    from trilemma.privacy.mechanism import Mechanism, history, leans_on_liars, mechanism, multiplier
    from trilemma.privacy.noise import Noiseless, SimulatedNoise
    from trilemma.privacy.secrets import SecretNoise, StackedSecretNoise
    from trilemma.privacy.threats import Threat
    from trilemma.privacy.types import (
        Adjacency,
        Assumption,
        NoiseLaw,
        NoiseSource,
        Release,
        Sampling,
        ThreatName,
        Unit,
    )
    from trilemma.privacy.verdict import Guarantee, NoGuarantee, Verdict, judge, objections, read_verdict

__all__ = [
    "Accountant",
    "Adjacency",
    "Assumption",
    "Budget",
    "BudgetExceeded",
    "Guarantee",
    "Ledger",
    "LedgerError",
    "Mechanism",
    "NoGuarantee",
    "NoiseLaw",
    "NoiseSource",
    "Noiseless",
    "Objective",
    "Plan",
    "Price",
    "Release",
    "Sampling",
    "SecretGraph",
    "SecretNoise",
    "SimulatedNoise",
    "Spending",
    "StackedSecretNoise",
    "Threat",
    "ThreatName",
    "Unit",
    "Verdict",
    "allocate",
    "bound_multiplier",
    "calibrate",
    "certified",
    "certified_curve",
    "complete_multiplier",
    "composed_delta",
    "composed_epsilon",
    "covariance",
    "default_accountant",
    "epsilon_curve",
    "history",
    "honest_mean",
    "judge",
    "leans_on_liars",
    "mean_noise",
    "mechanism",
    "multiplier",
    "multipliers",
    "objections",
    "plan",
    "read_verdict",
    "required_multiplier",
    "spent",
    "spent_delta",
    "worst_multiplier",
]

on_demand(
    __name__,
    __all__,
    [
        "accountants",
        "accounting",
        "calibration",
        "covariance",
        "ledger_lines",
        "ledger",
        "mechanism",
        "noise",
        "secrets",
        "threats",
        "types",
        "verdict",
    ],
)
