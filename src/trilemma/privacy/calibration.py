"""The least noise for a given ε: first a multiplier, then the pair (σ_ind, σ_cor) that reaches it.

The multiplier z depends on the accountant alone. Many pairs reach it: the variance a client's message keeps
given all others,

    V(σ_cor², σ_ind²) = ((n−q)σ_cor² + σ_ind²) / (1 + σ_cor² / ((f−q)σ_cor² + σ_ind²)) ≥ (zΔ)²   (Lemma A.4),

grows linearly when both variances do, so only their ratio is free: a one-dimensional search for the ratio
that costs the least. Two prices are offered.

* `honest_mean`: the noise left in the mean of the honest messages, (f σ_cor² + σ_ind²)/(n − f).
* `theorem`: the noise part of σ̄² in Theorem 4.2 of the CafCor paper as d grows,
  (f σ_cor² + σ_ind²) + 432 κ (n σ_cor² + σ_ind²) up to a factor. Its constant 432 comes from a covering
  argument and weighs σ_cor² so heavily that it answers "local noise only" unless few clients in a hundred are
  Byzantine; that is a property of the bound, not of the algorithm.

With f = 0 pairwise noise is free, and more of it is always better: σ_cor = 10 σ_ind is where that search
ends, within about one per cent of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar

from trilemma.errors import PrivacyError, UserError
from trilemma.privacy.accounting import Accountant, composed_epsilon
from trilemma.privacy.bounds import caf_kappa, mean_noise
from trilemma.privacy.covariance import complete_multiplier
from trilemma.privacy.gaussian import check_delta, gaussian_mu
from trilemma.privacy.mechanism import WHOLE, Mechanism, mechanism
from trilemma.privacy.pld import PldFailure, pld_epsilon
from trilemma.privacy.rdp import GAUSSIAN_ORDERS, SAMPLED_ORDERS, rdp_epsilon, round_rdp
from trilemma.privacy.threats import Threat
from trilemma.privacy.types import Adjacency, NoiseLaw, Release, Sampling, Unit, choice

Objective = Literal["honest_mean", "theorem"]
_SAFE = 1 + 1e-12
_LARGEST_RATIO = 100.0  # σ_cor²/σ_ind²


def required_multiplier(
    epsilon: float, delta: float, rounds: int, like: Mechanism, accountant: Accountant
) -> float:
    """Return the smallest z whose `rounds` rounds cost at most `epsilon`, up to 1e-6 (pld: 1e-3) too large.

    `like` gives sampling and adjacency; its z is where the search starts. Where `pld` fails, the answer is
    that of `rdp`, which is larger.

    >>> z = required_multiplier(26.4, 1e-4, 30, Mechanism(1.0), "rdp")
    >>> round(z, 3), composed_epsilon(((Mechanism(z), 30),), 1e-4, "rdp") <= 26.4
    (1.27, True)
    """
    check_delta(delta)
    if not epsilon > 0:
        raise PrivacyError(f"epsilon is positive, got {epsilon}")
    if rounds < 1:
        raise UserError(f"calibration needs at least one round, got {rounds}")
    if math.isinf(epsilon):
        return 0.0
    if accountant == "exact" and like.gaussian:
        factor = like.effective_z / like.z
        return math.sqrt(rounds) / gaussian_mu(epsilon, delta) / factor * _SAFE

    def cost(z: float) -> float:
        return composed_epsilon(((replace(like, z=z), rounds),), delta, accountant)

    if accountant not in ("rdp", "pld"):
        return _solve(cost, epsilon, like.z)
    renyi = _solve(_near_best_orders(like, rounds, epsilon, delta), epsilon, like.z)
    if accountant == "rdp":
        return renyi

    def coarse(z: float) -> float:
        return pld_epsilon(((replace(like, z=z), rounds),), delta, coarser=8)

    try:
        # A coarse grid is on the safe side too. Rényi accounting, which is looser, says where to start.
        z = _solve(coarse, epsilon, renyi, 1e-4)
        while cost(z) > epsilon:
            z *= 1 + 1e-6
    except PldFailure:
        return renyi
    return z


def _near_best_orders(like: Mechanism, rounds: int, epsilon: float, delta: float) -> Callable[[float], float]:
    """Return an RDP cost that tries only orders near the best one at `epsilon`: valid, and much faster."""
    orders = GAUSSIAN_ORDERS if like.gaussian else np.asarray(SAMPLED_ORDERS)
    if like.sampling.scheme == "without_replacement" and like.adjacency == "replace":
        orders = orders[orders % 1 == 0]  # the others have no bound of their own

    def cost(z: float, orders: NDArray[np.float64] = orders) -> float:
        return float(rdp_epsilon(rounds * round_rdp(replace(like, z=z), tuple(orders)), orders, delta))

    if like.gaussian:
        return cost
    tried, best = np.concatenate((orders[::10], orders[-4:])), -len(orders)
    for _ in range(8):
        z = _solve(partial(cost, orders=tried), epsilon, like.z, 1e-2)
        rho = rounds * round_rdp(replace(like, z=z), tuple(orders[::4]))
        last, best = best, 4 * int(np.argmin(rho - np.log(delta) / (orders[::4] - 1)))
        if abs(best - last) <= 4:
            break
        tried = orders[max(0, best - 8) : best + 9]
    return partial(cost, orders=tried)


def _solve(cost: Callable[[float], float], epsilon: float, start: float, tolerance: float = 1e-6) -> float:
    """Return z with cost(z) ≤ epsilon, within a factor 1 + tolerance of the least, for a falling `cost`."""
    low, high = 0.0, start
    while cost(high) > epsilon:
        low, high = high, 2 * high
        if high > 1e9:
            raise PrivacyError(
                f"no noise is certified to cost as little as epsilon = {epsilon} by this accountant"
            )
    while low == 0.0:
        low, high = (high / 2, high) if cost(high / 2) > epsilon else (0.0, high / 2)
        if high < 1e-9:
            return high

    def excess(log_z: float) -> float:
        # Costs of zero or infinity would stop the secant steps.
        return math.log(min(max(cost(math.exp(log_z)), 1e-9), 1e12) / epsilon)

    z = math.exp(brentq(excess, math.log(low), math.log(high), xtol=tolerance / 2)) * (1 + tolerance / 2)
    while cost(z) > epsilon:
        z *= 1 + tolerance / 2
    return z


def calibrate(
    epsilon: float,
    delta: float,
    rounds: int,
    clip: float,
    threat: Threat,
    unit: Unit = "user",
    batch: int = 1,
    sampling: Sampling = WHOLE,
    accountant: Accountant | None = None,
    objective: Objective = "honest_mean",
    adjacency: Adjacency = "replace",
) -> NoiseLaw:
    """Return the least noise for which no honest client spends more than `epsilon` in `rounds` rounds.

    Without `accountant` the exact one is used where it applies, and `rdp` for sampled releases.

    >>> law = calibrate(26.4, 1e-4, rounds=30, clip=2.25, threat=Threat("secldp", 100, 10), accountant="rdp")
    >>> round(law.sigma_ind, 3), round(law.sigma_cor, 3)
    (0.0, 0.6)
    >>> law = calibrate(26.4, 1e-4, rounds=30, clip=2.25, threat=Threat("ldp", 100, 10))
    >>> round(law.sigma_ind, 2)
    5.44
    """
    shape = Release(clip, NoiseLaw(), unit, batch, sampling, adjacency)
    return plan(shape, (threat,), epsilon, delta, rounds, accountant, objective)[0].law


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
        return mean_noise(self.law, self.threat.clients, self.threat.byzantine)


def plan(
    shape: Release,
    threats: Sequence[Threat],
    epsilon: float,
    delta: float,
    rounds: int,
    accountant: Accountant | None = None,
    objective: Objective = "honest_mean",
) -> tuple[Plan, ...]:
    """Return the least noise for releases like `shape` (its own law is ignored) under each of `threats`.

    >>> threats = [Threat("secldp", 100, 10, q) for q in (0, 5, 10)]
    >>> plans = plan(Release(clip=2.25, law=NoiseLaw()), threats, epsilon=26.4, delta=1e-4, rounds=30)
    >>> [round(p.variance, 4) for p in plans]
    [0.0361, 0.0415, 0.061]
    """
    choice("objective", objective, Objective)
    if math.isinf(shape.clip) and math.isfinite(epsilon):
        raise PrivacyError("no noise protects an unclipped release: give a finite clip")
    like = _unit_mechanism(shape)
    z = required_multiplier(epsilon, delta, rounds, like, accountant or default_accountant(shape))
    if z == 0:
        return tuple(Plan(threat, NoiseLaw()) for threat in threats)
    deviation = z * shape.sensitivity * _SAFE
    return tuple(Plan(threat, allocate(deviation, threat, objective)) for threat in threats)


def default_accountant(shape: Release) -> Accountant:
    """Return the accountant that calibrates releases like `shape` when none is named.

    >>> default_accountant(Release(clip=1.0, law=NoiseLaw()))
    'exact'
    """
    return "exact" if _unit_mechanism(shape).gaussian else "rdp"


def _unit_mechanism(shape: Release) -> Mechanism:
    return mechanism(replace(shape, clip=1.0, law=NoiseLaw(1.0)), Threat("ldp", 1))


def allocate(deviation: float, threat: Threat, objective: Objective = "honest_mean") -> NoiseLaw:
    """Return the cheapest law that leaves noise of at least `deviation` on a message given all the others.

    >>> law = allocate(1.0, Threat("byzldp", clients=100, byzantine=10))
    >>> round(law.sigma_ind, 3), round(law.sigma_cor, 3)
    (0.219, 0.117)
    """
    n, f, q = threat.clients, threat.byzantine, threat.collusion
    if threat.name == "ldp":
        return NoiseLaw(sigma_ind=deviation)
    if threat.name == "cdp":
        return NoiseLaw(sigma_ind=deviation / math.sqrt(threat.honest))
    price_cor, price_ind = _prices(threat, objective)

    def price(ratio: float) -> float:
        """Cost per unit of protection at σ_cor² = ratio · σ_ind²; infinite: pairwise noise alone."""
        cor, ind = (1.0, 0.0) if math.isinf(ratio) else (ratio, 1.0)
        return (price_cor * cor + price_ind * ind) / complete_multiplier(_law(cor, ind), 1.0, n, f, q) ** 2

    ratios = [0.0, *np.geomspace(1e-6, _LARGEST_RATIO, 400)]
    if q < f:
        ratios += [*np.geomspace(_LARGEST_RATIO, 1e6, 100)[1:], math.inf]
    best = min(range(len(ratios)), key=lambda k: price(ratios[k]))
    ratio = ratios[best]
    if 1 < best < len(ratios) - 2:
        ratio = _golden(price, ratios[best - 1], ratios[best + 1])
    cor, ind = (1.0, 0.0) if math.isinf(ratio) else (ratio, 1.0)
    scale = (deviation / complete_multiplier(_law(cor, ind), 1.0, n, f, q)) ** 2
    law = _law(cor * scale, ind * scale)
    while complete_multiplier(law, 1.0, n, f, q) < deviation:
        law = NoiseLaw(law.sigma_ind * _SAFE, law.sigma_cor * _SAFE)
    return law


def _law(cor: float, ind: float) -> NoiseLaw:
    return NoiseLaw(sigma_ind=math.sqrt(ind), sigma_cor=math.sqrt(cor))


def _prices(threat: Threat, objective: Objective) -> tuple[float, float]:
    """Return what one unit of σ_cor² and of σ_ind² costs."""
    n, f = threat.clients, threat.byzantine
    if objective == "honest_mean":
        return float(f), 1.0
    heavy = 432 * caf_kappa(n, f)
    return f + heavy * n, 1 + heavy


def _golden(price: Callable[[float], float], low: float, high: float) -> float:
    found = minimize_scalar(price, bounds=(low, high), method="bounded", options={"xatol": 1e-9 * high})
    return float(found.x)
