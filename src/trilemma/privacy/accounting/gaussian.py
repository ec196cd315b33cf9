"""The composed Gaussian mechanism, exactly.

T rounds of noise multipliers z_1 … z_T are together one Gaussian mechanism of parameter μ = √(Σ_t 1/z_t²):
its output is N(0, 1) or N(μ, 1). It is (ε, δ)-DP if and only if (Balle and Wang, ICML 2018)

    δ ≥ Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ).

With a = μ/2 − ε/μ and b = −μ/2 − ε/μ, b² = a² + 2ε turns the right side into ½ e^{−a²/2} [erfcx(−a/√2) −
erfcx(−b/√2)], which neither overflows for huge ε nor loses digits for tiny δ. For small μ the difference of
the two erfcx is integrated, from erfcx'(x) = 2x erfcx(x) − 2/√π, to keep its digits.

Searches bracket the answer with the zero-concentrated bound ε ≤ μ²/2 + μ√(2 log(1/δ)) and return the safe
end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from trilemma.base.errors import PrivacyError

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
_BITS = 80  # the bracket's relative width starts below 2⁴ and floats have 53 bits
_PARTS = 128  # into which a bracket is cut at once: so many numbers cost numpy little more than one
_ROUNDING = 1 + 4e-12  # more than the rounding errors of δ, always to the safe side
LEAST_DELTA = 2.3e-308
"""Below it floats lose their digits one by one, and no figure would be on the safe side."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)


def check_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1), and one that floats do not hold with all its digits.

    >>> check_delta(0.0)
    Traceback (most recent call last):
    trilemma.base.errors.PrivacyError: delta is a probability strictly between 0 and 1, got 0.0
    """
    if not 0 < delta < 1:
        raise PrivacyError(f"delta is a probability strictly between 0 and 1, got {delta}")
    if delta < LEAST_DELTA:
        raise PrivacyError(f"delta is at least {LEAST_DELTA:g}, the least that floats hold, got {delta:g}")


def gaussian_delta(mu: ArrayLike, epsilon: ArrayLike) -> Array:
    """Return the smallest δ for which N(0, 1) against N(μ, 1) is (ε, δ)-DP, elementwise.

    >>> float(gaussian_delta(1.0, 0.0).round(6))
    0.382925
    """
    mu, eps = np.broadcast_arrays(np.asarray(mu, float), np.asarray(epsilon, float))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        a, b = mu / 2 - eps / mu, -mu / 2 - eps / mu
        second = np.exp(-(a**2) / 2) * scipy.special.erfcx(-b / math.sqrt(2)) / 2
        # In the far right tail both terms are equal to within rounding: take their difference before scaling.
        gap = scipy.special.erfcx(-a / math.sqrt(2)) - scipy.special.erfcx(-b / math.sqrt(2))
        if (mu < 0.5).any():
            gap = np.where(mu < 0.5, _erfcx_drop(eps / mu, mu), gap)
        delta = np.where((a < 0) | (mu < 0.5), np.exp(-(a**2) / 2) * gap / 2, scipy.special.ndtr(a) - second)
    delta = np.where(mu <= 0, 0.0, np.where(np.isinf(mu), 1.0, delta))
    return np.clip(delta, 0.0, 1.0)


def _erfcx_drop(middle: Array, width: Array) -> Array:
    """Return how far x ↦ erfcx(x/√2) falls between middle − width/2 and middle + width/2, which are near.

    The width itself, for as a difference of two ends it would be rounded as they are.
    """
    middle, half = np.broadcast_arrays(middle / math.sqrt(2), width / math.sqrt(8))
    x = middle[..., None] + half[..., None] * _NODES
    slope = 2 / math.sqrt(math.pi) - 2 * x * scipy.special.erfcx(x)
    return np.asarray(half * (slope @ _WEIGHTS))


def gaussian_epsilon(mu: ArrayLike, delta: float) -> Array:
    """Return the smallest ε for which N(0, 1) against N(μ, 1) is (ε, δ)-DP, elementwise.

    >>> float(gaussian_epsilon(1.0, 1e-5).round(4))
    4.3772
    >>> gaussian_epsilon([0.0, 1e-7, np.inf], 1e-5).tolist()
    [0.0, 0.0, inf]
    """
    check_delta(delta)
    mu = np.asarray(mu, float)
    finite = np.where(np.isinf(mu), 0.0, mu)
    low = np.zeros_like(finite)
    high = finite**2 / 2 + finite * math.sqrt(-2 * math.log(delta))
    _, high = _narrowed(lambda eps: gaussian_delta(finite[..., None], eps) <= delta / _ROUNDING, low, high)
    high = np.where(gaussian_delta(finite, 0.0) <= delta / _ROUNDING, 0.0, high)
    return np.where(np.isinf(mu), np.inf, high)


def _narrowed(beyond: Callable[[Array], Bools], low: Array, high: Array) -> tuple[Array, Array]:
    """Narrow brackets of the point where `beyond` begins to hold until they are a rounding error wide.

    `beyond` is asked for several points of each bracket, in a last dimension of their own. Where rounding
    makes it waver, the upper end is where it holds for good.
    """
    parts = _PARTS if low.size <= 4 else 2
    shares = np.arange(1, parts) / parts
    for _ in range(math.ceil(_BITS / math.log2(parts))):
        cuts = low[..., None] + (high - low)[..., None] * shares
        before = ~beyond(cuts)
        ends = np.concatenate([low[..., None], cuts, high[..., None]], axis=-1)
        last = np.where(before.any(-1), parts - 1 - before[..., ::-1].argmax(-1), 0)[..., None]
        low, high = (np.take_along_axis(ends, last + more, -1)[..., 0] for more in (0, 1))
    return low, high


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest μ that is (ε, δ)-DP: the least noise one may add.

    >>> mu = gaussian_mu(1.0, 1e-5)
    >>> float(gaussian_epsilon(mu, 1e-5)) <= 1.0, round(1 / mu, 4)
    (True, 3.7306)
    """
    check_delta(delta)
    if not epsilon > 0:
        raise PrivacyError(f"epsilon is positive, got {epsilon}")
    if math.isinf(epsilon):
        return math.inf
    root = math.sqrt(-2 * math.log(delta))
    low = 2 * epsilon / (root + math.sqrt(root**2 + 2 * epsilon))  # solves the concentrated bound for μ
    high = 2 * low
    while gaussian_delta(high, epsilon) <= delta:
        low, high = high, 2 * high
    bracket = np.asarray(low), np.asarray(high)
    low = float(_narrowed(lambda mu: gaussian_delta(mu, epsilon) > delta, *bracket)[0])
    step = _ROUNDING - 1
    while gaussian_epsilon(low, delta) > epsilon:
        low, step = low / (1 + step), 2 * step  # near δ = 1, which hardly moves with μ, one is not enough
    return low
