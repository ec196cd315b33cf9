"""Logarithm, sine and cosine as polynomials, highest power first: the numbers both ways of drawing share."""

from __future__ import annotations

import math

# log m = log √2 + 2 artanh s for m in [1, 2), s = (m − √2)/(m + √2), |s| < 0.172: terms in s².
ARTANH = tuple(2.0 / k for k in range(21, 0, -2))
# sine and cosine on [−π/4, π/4], terms in φ².
SINE = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(7, -1, -1))
COSINE = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(8, -1, -1))

# Decimal literals, so that no machine's math library has a say in them.
ROOT_2 = 1.4142135623730951
HALF_ROOT_2 = 0.7071067811865476
LOG_2 = 0.6931471805599453
QUARTER = math.pi / 2
"""π/2, the width of a quadrant."""

WHOLE = 1.5 * 2.0**52
"""Adding and subtracting it rounds |x| < 2⁵¹ to the nearest integer."""
