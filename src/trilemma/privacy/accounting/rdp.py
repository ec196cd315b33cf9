"""Rényi accounting: one round's divergences, their sum, and the conversion to (ε, δ).

A mechanism is (α, ρ(α))-RDP if the Rényi divergence of order α between its outputs on adjacent data sets is
at most ρ(α). Divergences add up over rounds. One round of noise multiplier z costs

* no sampling: ρ(α) = α / (2z²);
* Poisson sampling, add/remove: the sampled Gaussian mechanism (Mironov, Talwar, Zhang 2019), by
  dp-accounting;
* Poisson sampling, replace: dp-accounting has none; the divergence of the worst pair is integrated here;
* without replacement, replace: Theorem 27 of Wang, Balle, Kasiviswanathan (AISTATS 2019), by dp-accounting
  for small orders.

The worst pair. Given the rest of the batch, one round outputs (1−r)N(0) + rN(x) or (1−r)N(0) + rN(x'), with
‖x‖, ‖x'‖ ≤ C/b = ½ in units of the move. By advanced joint convexity (Balle, Barthe, Gaboardi 2018) its
hockey-stick divergence is r H_α(N(x) ‖ (1−β)N(0) + βN(x')), the expectation of the convex function (1 − aA
− bB)_+ of two log-normal variables of mean one whose logarithms have covariances ‖x‖², ‖x−x'‖² and ‖x‖² −
⟨x, x'⟩. Raising any of the three raises such an expectation (Kahane's inequality), and x = −x' of norm C/b
maximises all of them at once, for every order. So (1−r)N(0) + rN(±C/b) dominates.

None is larger than without sampling. The conversion is the tightest known one (Canonne, Kamath, Steinke 2020,
Prop. 12): ε = min_α ρ(α) + log(1 − 1/α) − log(αδ)/(α − 1). Any set of orders gives a valid ε.

`theorem_c1` is the older statement of the SAFE-DSHB paper (Allouah et al., ICML 2023, Appendix C), kept
apart.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import cast

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from trilemma.base.errors import PrivacyError
from trilemma.privacy.accounting.gaussian import check_delta
from trilemma.privacy.mechanism import Mechanism

Array = NDArray[np.float64]

SAMPLED_ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(64, 80, 96, 128, 160, 192, 256, 384, 512, 1024),
)
"""Orders tried for sampled mechanisms, where each costs time: those customary since Abadi et al. 2016."""

GAUSSIAN_ORDERS: Array = 1 + np.geomspace(1e-4, 1e6, 2001)
"""Orders tried for plain Gaussian mechanisms, where they cost nothing: from huge ε down to tiny."""


def gaussian_rdp(z: float, orders: ArrayLike = GAUSSIAN_ORDERS) -> Array:
    """Return ρ(α) = α/(2z²) of one unsampled round.

    >>> gaussian_rdp(2.0, [2, 8]).tolist()
    [0.25, 1.0]
    """
    orders = np.asarray(orders, float)
    return np.full_like(orders, np.inf) if z == 0 else orders / (2 * z**2)


def round_rdp(mechanism: Mechanism, orders: tuple[float, ...] = SAMPLED_ORDERS) -> Array:
    """Return ρ(α) of one round of `mechanism` at `orders`.

    >>> from trilemma.privacy.types import Sampling
    >>> half = Mechanism(0.5, Sampling("poisson", 100 / 6000), "published")
    >>> float(round_rdp(half, (2.0,))[0].round(5))
    0.01478
    """
    z, rate = mechanism.effective_z, mechanism.sampling.rate
    plain = gaussian_rdp(z, orders)
    if mechanism.gaussian or z == 0:
        return plain
    if mechanism.adjacency != "replace":
        return np.minimum(plain, _sampled_gaussian(z, rate, orders))
    if mechanism.sampling.scheme == "without-replacement":
        return np.minimum(plain, _without_replacement(z, rate, orders))
    return np.minimum(plain, _poisson_replace(z, rate, orders))


def rdp_epsilon(rho: ArrayLike, orders: ArrayLike, delta: float) -> Array:
    """Return ε of total divergences `rho` (..., orders) at δ: never negative, infinite if they all are.

    >>> float(rdp_epsilon(30 * gaussian_rdp(1.27128345), GAUSSIAN_ORDERS, 1e-4).round(1))
    26.4
    """
    check_delta(delta)
    alpha, rho = np.asarray(orders, float), np.asarray(rho, float)
    epsilon = rho + np.log1p(-1 / alpha) - np.log(delta * alpha) / (alpha - 1)
    return np.asarray(np.maximum(0.0, epsilon.min(axis=-1)))


def rdp_delta(rho: ArrayLike, orders: ArrayLike, epsilon: float) -> float:
    """Return δ of total divergences `rho` at ε, by the same conversion.

    >>> rho = 30 * gaussian_rdp(1.27128345)
    >>> bool(rdp_delta(rho, GAUSSIAN_ORDERS, float(rdp_epsilon(rho, GAUSSIAN_ORDERS, 1e-4))) < 1.0001e-4)
    True
    """
    alpha, rho = np.asarray(orders, float), np.asarray(rho, float)
    log_delta = (alpha - 1) * (rho + np.log1p(-1 / alpha) - epsilon) - np.log(alpha)
    return float(np.exp(np.minimum(0.0, np.min(log_delta))))


def theorem_c1(z: float, rate: float, rounds: int, delta: float, largest_order: int = 512) -> float:
    """Return ε of T rounds without replacement by Theorem C.1 of SAFE-DSHB.

    With ε(j) = j/(2z²) and r = b/m, one round at an integer order α ≥ 2 costs

        ε'(α) = 1/(α−1) log(1 + r² C(α,2) min{4(e^ε(2) − 1), 2e^ε(2)} + 2 Σ_{j=3}^α r^j C(α,j) e^{(j−1)ε(j)}),

    (α−1)ε'(α) is interpolated linearly between integers, and ε* = inf_α T ε'(α) + log(1/δ)/(α−1). On each
    interval that is a constant plus a constant over α − 1, so the infimum is attained at an integer.

    >>> round(theorem_c1(z=1.0, rate=25 / (11055 / 4), rounds=400, delta=1e-4), 2)
    2.17
    """
    check_delta(delta)
    if not 0 < rate <= 1:
        raise PrivacyError(f"the sampling rate b/m lies in (0, 1], got {rate}")
    if z == 0:
        return math.inf
    orders = np.arange(2, largest_order + 1)
    cost = np.array([_theorem_c1_log(z, rate, int(order)) for order in orders]) / (orders - 1)
    return float(np.min(rounds * cost - math.log(delta) / (orders - 1)))


def _theorem_c1_log(z: float, rate: float, order: int) -> float:
    j = np.arange(3, order + 1)
    higher = math.log(2) + j * math.log(rate) + _log_binomial(order, j) + (j - 1) * j / (2 * z**2)
    two = 1 / z**2  # ε(2)
    four = math.log(4) + two + math.log(-math.expm1(-two))
    second = 2 * math.log(rate) + math.log(order * (order - 1) / 2) + min(four, math.log(2) + two)
    return float(scipy.special.logsumexp(np.concatenate(([0.0, second], higher))))


@lru_cache(maxsize=256)
def _accounted(event: str, z: float, rate: float, orders: tuple[float, ...]) -> Array:
    try:
        return _by_dp_accounting(event, z, rate, orders)
    except (ImportError, ValueError):
        # Without the package, or where it overflows (z over 10⁷), bounds at integer orders serve: short sums.
        integer = _poisson_log if event == "poisson" else _theorem_c1_log
        return np.array([integer(z, rate, int(a)) / (a - 1) if a == int(a) else np.inf for a in orders])


def _by_dp_accounting(event: str, z: float, rate: float, orders: tuple[float, ...]) -> Array:
    import dp_accounting
    from dp_accounting import rdp

    relation = dp_accounting.NeighboringRelation
    gaussian = dp_accounting.GaussianDpEvent(z)
    if event == "poisson":
        accountant = rdp.RdpAccountant(list(orders), relation.ADD_OR_REMOVE_ONE)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian))
    else:
        # The event wants integers b and m, but only their ratio enters the formula.
        accountant = rdp.RdpAccountant(list(orders), relation.REPLACE_ONE)
        accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1, rate, gaussian))
    return cast(Array, accountant.rdp)


def _poisson_log(z: float, rate: float, order: int) -> float:
    """Return (α−1)ρ(α) of the Poisson-sampled Gaussian at an integer order: a binomial sum."""
    k = np.arange(order + 1)
    chances = (order - k) * math.log1p(-rate) + k * math.log(rate)
    return float(scipy.special.logsumexp(_log_binomial(order, k) + chances + k * (k - 1) / (2 * z**2)))


def _log_binomial(order: int, k: ArrayLike) -> Array:
    """Return log C(α, k)."""
    k = np.asarray(k)
    log_factorial = scipy.special.gammaln
    return log_factorial(order + 1) - log_factorial(k + 1) - log_factorial(order - k + 1)


def _sampled_gaussian(z: float, rate: float, orders: tuple[float, ...]) -> Array:
    with _quiet():
        return _safe(_accounted("poisson", z, rate, orders))


@lru_cache(maxsize=256)
def _poisson_replace(z: float, rate: float, orders: tuple[float, ...]) -> Array:
    """Integrate D_α of (1−r)N(0) + rN(c) from (1−r)N(0) + rN(−c), c = 1/(2z), by the trapezoidal rule.

    The rule converges faster than any power of the step on such analytic integrands; the last factor covers
    it.
    """
    shift = 0.5 / z
    rho = np.full(len(orders), np.inf)
    for k, order in enumerate(orders):
        if order * shift**2 > 200:
            continue  # a divergence too large to be of use, and the costliest to integrate
        # P^α Q^{1−α} peaks at or left of αc, and its sharpest features are 1/(c√α) wide.
        step = min(0.05, 0.2 / (max(1.0, shift) * math.sqrt(order)))
        y = np.arange(-12.0, order * shift + 12.0, step)
        up, down = shift * y - shift**2 / 2, -shift * y - shift**2 / 2
        log_p = np.logaddexp(math.log1p(-rate), math.log(rate) + up)
        log_q = np.logaddexp(math.log1p(-rate), math.log(rate) + down)
        log_integrand = order * log_p + (1 - order) * log_q - y**2 / 2
        total = scipy.special.logsumexp(log_integrand) + math.log(step) - math.log(2 * math.pi) / 2
        rho[k] = max(total, 0.0) / (order - 1) * (1 + 1e-9)
    return rho


def _without_replacement(z: float, rate: float, orders: tuple[float, ...]) -> Array:
    # Both bounds are for integers. dp-accounting's is tighter up to order 256, in time that grows with the
    # order's square; from there on it is that of Theorem C.1, which costs nothing.
    alpha = np.asarray(orders)
    whole = alpha % 1 == 0
    tight = whole & ((alpha <= 32) | ((alpha <= 64) & (alpha % 4 == 0)))
    rho = np.full(len(orders), np.inf)
    with _quiet():
        rho[tight] = _safe(_accounted("without-replacement", z, rate, tuple(alpha[tight])))
    for k in np.flatnonzero(whole & ~tight):
        rho[k] = _theorem_c1_log(z, rate, int(alpha[k])) / (alpha[k] - 1)
    return rho


def _safe(rho: Array) -> Array:
    """Give up orders where dp-accounting's series lost all digits: not a number, or below zero."""
    return np.where(rho >= 0, rho, np.inf)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep dp-accounting from warning about orders whose series does not converge: they are left out."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
