"""The least noise for a given ε: first a multiplier, then the pair (σ_ind, σ_cor) that reaches it.

The multiplier z depends on the accountant alone. Many pairs reach it: the variance a client's message keeps
given all others,

    V(σ_cor², σ_ind²) = ((n−q)σ_cor² + σ_ind²) / (1 + σ_cor² / (hσ_cor² + σ_ind²)) ≥ (zΔ)²   (Lemma A.4),

with h = 0 hidden liars for a guarantee and h = f − q as published, grows linearly when both variances do, so
only their ratio is free: a one-dimensional search for the ratio that costs the least. What counts as cost is
the objective; `honest_mean` is the usual one; the laboratory has a theorem's.

With f = 0 pairwise noise is free, and more of it is always better: σ_cor = 10 σ_ind is where that search
ends, within about one per cent of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from trilemma.base.errors import PrivacyError
from trilemma.privacy.accounting.accountants import ask, default
from trilemma.privacy.mechanism import WHOLE, History, Mechanism, mechanism
from trilemma.privacy.noise.drawing import EXACT, Drawing
from trilemma.privacy.threats.catalogue import Threat
from trilemma.privacy.threats.covariance import left_by_liars, mean_noise
from trilemma.privacy.types import Adjacency, NoiseLaw, Release, Sampling, Unit

_SAFE = 1 + 1e-12
_LARGEST_RATIO = 100.0  # σ_cor²/σ_ind²


def required_multiplier(
    epsilon: float, delta: float, rounds: int, like: Mechanism, accountant: str, beside: History = ()
) -> float:
    """Return the smallest z whose `rounds` rounds cost at most `epsilon`, up to 1e-6 (pld: 1e-3) too large.

    `like` gives sampling and adjacency; its z is where the search starts. What is released `beside` these
    rounds is in the cost.

    >>> from trilemma.privacy.accounting.spending import composed_epsilon
    >>> z = required_multiplier(26.4, 1e-4, 30, Mechanism(1.0), "rdp")
    >>> round(z, 3), composed_epsilon(((Mechanism(z), 30),), 1e-4, "rdp") <= 26.4
    (1.27, True)
    """
    return ask(accountant, lambda asked: asked.multiplier(epsilon, delta, rounds, like, beside)).figure


@dataclass(frozen=True)
class Price:
    """What one unit of σ_cor² and one of σ_ind² cost."""

    cor: float
    ind: float


Objective = Callable[[Threat], Price]
"""What calibration minimises, in a given federation."""


def honest_mean(threat: Threat) -> Price:
    """The noise left in the mean of the honest messages, (f σ_cor² + σ_ind²)/(n − f) (`mean_noise`).

    >>> honest_mean(Threat("secldp", clients=100, byzantine=10))
    Price(cor=10.0, ind=1.0)
    """
    if threat.scales:
        n, f = threat.clients, threat.byzantine
        laws = (NoiseLaw(sigma_cor=1.0), NoiseLaw(sigma_ind=1.0))
        return Price(*(mean_noise(law, n, f, scales=threat.scales) for law in laws))
    return Price(left_by_liars(threat.clients, threat.byzantine, threat.neighbours), 1.0)


def calibrate(
    epsilon: float,
    delta: float,
    rounds: int,
    clip: float,
    threat: Threat,
    unit: Unit = "user",
    batch: int = 1,
    sampling: Sampling = WHOLE,
    accountant: str | None = None,
    objective: Objective = honest_mean,
    adjacency: Adjacency = "replace",
    drawing: Drawing = EXACT,
    beside: History = (),
) -> NoiseLaw:
    """Return the least noise for which no honest client spends more than `epsilon` in `rounds` rounds.

    Without `accountant` the tightest calibrates: exact where it applies, `pld` for sampled releases.
    `drawing` says how far one round's noise will be from a Gaussian. `beside` is what else is released in
    these rounds, with noise that is settled.

    >>> law = calibrate(26.4, 1e-4, rounds=30, clip=2.25, threat=Threat("secldp", 100, 10), accountant="rdp")
    >>> round(law.sigma_ind, 2), round(law.sigma_cor, 2)
    (1.19, 0.64)
    >>> threat = Threat("secldp", 100, 10, assume="published")
    >>> law = calibrate(26.4, 1e-4, rounds=30, clip=2.25, threat=threat, accountant="rdp")
    >>> round(law.sigma_ind, 3), round(law.sigma_cor, 3)
    (0.0, 0.6)
    >>> law = calibrate(26.4, 1e-4, rounds=30, clip=2.25, threat=Threat("ldp", 100, 10))
    >>> round(law.sigma_ind, 2)
    5.44
    """
    shape = Release(clip, NoiseLaw(), unit, batch, sampling, adjacency, drawing)
    return plan(shape, (threat,), epsilon, delta, rounds, accountant, objective, beside)[0].law


@dataclass(frozen=True)
class Plan:
    """The noise a threat model needs, and the error it predicts: its variance in the honest clients' mean.

    >>> round(Plan(Threat("secldp", 100, 10), NoiseLaw(sigma_cor=0.6)).variance, 4)
    0.04
    """

    threat: Threat
    law: NoiseLaw

    @property
    def variance(self) -> float:
        """Variance of the noise in one coordinate of the honest mean."""
        threat = self.threat
        return mean_noise(self.law, threat.clients, threat.byzantine, threat.neighbours, threat.scales)


def plan(
    shape: Release,
    threats: Sequence[Threat],
    epsilon: float,
    delta: float,
    rounds: int,
    accountant: str | None = None,
    objective: Objective = honest_mean,
    beside: History = (),
) -> tuple[Plan, ...]:
    """Return the least noise for releases like `shape` (its own law is ignored) under each of `threats`.

    >>> threats = [Threat("secldp", 100, 10, q) for q in (0, 5, 10)]
    >>> plans = plan(Release(clip=2.25, law=NoiseLaw()), threats, epsilon=26.4, delta=1e-4, rounds=30)
    >>> [round(p.variance, 4) for p in plans]
    [0.0551, 0.0579, 0.061]
    """
    if math.isinf(shape.clip) and math.isfinite(epsilon):
        raise PrivacyError("no noise protects an unclipped release: give a finite clip")
    like = _unit_mechanism(shape)
    z = required_multiplier(epsilon, delta, rounds, like, accountant or default_accountant(shape), beside)
    if z == 0:
        return tuple(Plan(threat, NoiseLaw()) for threat in threats)
    deviation = z * shape.sensitivity * _SAFE
    return tuple(Plan(threat, allocate(deviation, threat, objective)) for threat in threats)


def default_accountant(shape: Release) -> str:
    """Return the accountant that calibrates releases like `shape` when none is named.

    >>> default_accountant(Release(clip=1.0, law=NoiseLaw()))
    'exact'
    """
    return default(((_unit_mechanism(shape), 1),)).name


def _unit_mechanism(shape: Release) -> Mechanism:
    return mechanism(replace(shape, clip=1.0, law=NoiseLaw(1.0)), Threat("ldp", 1))


def allocate(deviation: float, threat: Threat, objective: Objective = honest_mean) -> NoiseLaw:
    """Return the cheapest law that leaves noise of at least `deviation` on a message given all the others.

    >>> law = allocate(1.0, Threat("byzldp", clients=100, byzantine=10))
    >>> round(law.sigma_ind, 3), round(law.sigma_cor, 3)
    (0.219, 0.117)
    """
    model = threat.model
    if model.central or not model.shares:
        return NoiseLaw(sigma_ind=deviation / model.multiplier(NoiseLaw(1.0), 1.0, threat))
    unit = objective(threat)

    def price(ratio: float) -> float:
        """Cost per unit of protection at σ_cor² = ratio · σ_ind²; infinite: pairwise noise alone."""
        cor, ind = (1.0, 0.0) if math.isinf(ratio) else (ratio, 1.0)
        return (unit.cor * cor + unit.ind * ind) / model.multiplier(_law(cor, ind), 1.0, threat) ** 2

    ratios = [0.0, *np.geomspace(1e-6, _LARGEST_RATIO, 400)]
    if threat.hidden:
        ratios += [*np.geomspace(_LARGEST_RATIO, 1e6, 100)[1:], math.inf]
    best = min(range(len(ratios)), key=lambda k: price(ratios[k]))
    ratio = ratios[best]
    if 1 < best < len(ratios) - 2:
        ratio = _golden(price, ratios[best - 1], ratios[best + 1])
    cor, ind = (1.0, 0.0) if math.isinf(ratio) else (ratio, 1.0)
    scale = (deviation / model.multiplier(_law(cor, ind), 1.0, threat)) ** 2
    law = _law(cor * scale, ind * scale)
    while model.multiplier(law, 1.0, threat) < deviation:
        law = NoiseLaw(law.sigma_ind * _SAFE, law.sigma_cor * _SAFE)
    return law


def _law(cor: float, ind: float) -> NoiseLaw:
    return NoiseLaw(sigma_ind=math.sqrt(ind), sigma_cor=math.sqrt(cor))


def _golden(price: Callable[[float], float], low: float, high: float) -> float:
    found = scipy.optimize.minimize_scalar(
        price, bounds=(low, high), method="bounded", options={"xatol": 1e-9 * high}
    )
    return float(found.x)
