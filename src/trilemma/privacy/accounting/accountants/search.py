"""The least noise by a search, where no closed form gives it."""

from __future__ import annotations

import math
from collections.abc import Callable

import scipy

from trilemma.base.errors import PrivacyError


def least_multiplier(
    cost: Callable[[float], float], epsilon: float, start: float, tolerance: float = 1e-6
) -> float:
    """Return z with cost(z) ≤ epsilon, within a factor 1 + tolerance of the least, for a falling `cost`.

    >>> z = least_multiplier(lambda z: 1 / z, epsilon=0.5, start=1.0)
    >>> 2.0 <= z < 2.00001
    True
    """
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
        least, most = min(1e-9, epsilon / 2), max(1e12, 2 * epsilon)
        return math.log(min(max(cost(math.exp(log_z)), least), most) / epsilon)

    root = scipy.optimize.brentq(excess, math.log(low), math.log(high), xtol=tolerance / 2)
    z = math.exp(root) * (1 + tolerance / 2)
    while cost(z) > epsilon:
        z *= 1 + tolerance / 2
    return z
