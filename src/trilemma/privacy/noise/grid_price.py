"""How far noise drawn on the grid is from the Gaussian noise that accountants speak of.

Ideally a pair of numbers is (X, Y) = R (cos Θ, sin Θ), R = √(−2 log U), with U and Θ uniform, and the
integers are ⌊sX⌉ and ⌊sY⌉. `trilemma.privacy.secrets.streams` takes U and Θ from finite words and calculates
in doubles. Both numbers of a pair come from the same words, so it is pairs of integers whose probabilities
are compared, p(k, l) and p̃(k, l). ChaCha20, HKDF and the system's generator are taken for ideal.

**Points move a little.** Let the words be those whose little rectangle the ideal (U, Θ) lies in. Then what
is drawn is (X, Y), each moved by at most

    D(r) = max(2⁻⁴⁸, 2⁻⁵¹/r) + r (2⁻⁵¹·³ + 2⁻⁵¹ + 2⁻⁵²) + snap(r):

the error of the radius (a test compares with 60 digits), θ's 2⁵⁴ values, the error of sine and cosine, two
products that are rounded, and the values u may take: snap(r) = 2⁻⁶⁵/(u r), and 2⁻¹²⁹/(u r) where u < 2⁻²⁴,
with u = e^{−r²/2}: at most 2⁻⁴³·⁵ up to r = 11, and 2⁻³⁷ up to r = 11.5.

**So probabilities change a little.** A pair of integers is a square of side 1/s in the plane. Whoever moves
into it or out of it was within D of its edge, so

    |p̃/p − 1| ≤ x = 4 edges · 2D · s · 1.1 ≤ 9 s D,

1.1 for how much the density varies over the square (r ≤ 11.5, s ≥ 2¹⁰, D s ≤ 2⁻⁶). Edges are never nearer to
the origin than 1/(2s): D ≤ 2⁻³⁶ + 2⁻⁵⁰ s. In the mean square over all pairs D is below 2⁻⁴⁶: 2⁻⁴⁷·⁵ for the
first and third term (E r² = 2), 2⁻⁵¹ √(18 + 4 log s) for what happens near the origin, 2⁻⁵⁵ for snap.

**Nothing is claimed** beyond r = 11.5, which has probability e^{−66.1}; 3e-29 covers squares that are partly
there, in both laws. That is what limits ε: noise that never exceeds 13.4 standard deviations cannot hide a
move of many, and e^ε times what is missed must fit into δ. Beyond an ε of 25 to 45, depending on how much is
drawn, nothing is certified.

**How many?** The adversary sees all messages, so all streams count, n own and n(n−1)/2 shared ones, d numbers
a round each; under ldp everybody else's noise is known, and only the client's own stream counts.

The lattice (`docs/privacy.md`) adds a factor: 4d · 2m e^{−2π²ρ²/3} a round, m < n² the number of independent
cycles of secrets: below 1e-30 wherever this library can run.
"""

from __future__ import annotations

import math

from trilemma.base.errors import PrivacyError
from trilemma.privacy.noise.drawing import LARGEST_WORST, Drawing
from trilemma.privacy.noise.grid import FINENESS, SMOOTHING, Grid, in_steps
from trilemma.privacy.types import NoiseLaw

EDGES = 9.0
"""x = |p̃/p − 1| of a pair of integers is at most this times s D."""

MOVED, MOVED_MOST, MOVED_NEAR = 2.0**-46, 2.0**-36, 2.0**-50
"""How far points move, in standard deviations: in the mean square, at most, and per step near the origin."""

TAIL = 3e-29
"""Probability of pairs about which nothing is claimed."""


def pair_error(steps: float) -> tuple[float, float]:
    """Return the error x of a pair's probabilities, in the mean square and at most, for s = `steps`.

    >>> typical, worst = pair_error(2.0**13)
    >>> typical < 2**-29, worst < 2**-19
    (True, True)
    """
    if steps < FINENESS:
        raise PrivacyError(f"a grid has at least {FINENESS:g} steps in a standard deviation, got {steps:g}")
    return EDGES * steps * MOVED, EDGES * steps * (MOVED_MOST + MOVED_NEAR * steps)


def drawing(law: NoiseLaw, grid: Grid, clients: int, *, shares: bool = True) -> Drawing:
    """Return how far one round's noise on `grid` is from `law`, in a federation of `clients` clients.

    `shares`: whether noise that pairs of them share protects anybody.

    >>> from trilemma.privacy.types import Release
    >>> law = NoiseLaw(sigma_ind=0.1, sigma_cor=0.6)
    >>> grid = Grid.of(Release(clip=2.25, law=law), dim=431_080, clients=100)
    >>> found = drawing(law, grid, clients=100)
    >>> found.spread < 2e-9, found.missed < 1e-18
    (True, True)
    """
    if grid.scales:  # as if every own stream were the longest of them: its error is the largest
        law = NoiseLaw(law.sigma_ind * max(grid.scales), law.sigma_cor)
    streams = {law.sigma_ind: clients, law.sigma_cor: clients * (clients - 1) // 2}
    if law.sigma_ind == law.sigma_cor:
        streams = {law.sigma_ind: clients * (clients + 1) // 2}
    if not shares:
        streams = {law.sigma_ind: 1}
    pairs = (grid.dim + 1) // 2
    spread = worst = missed = 0.0
    for sigma, count in streams.items():
        if sigma > 0:
            typical, most = pair_error(in_steps(sigma, grid.step))
            spread += count * pairs * typical**2
            worst = max(worst, most)
            missed += count * pairs * TAIL
    if worst > LARGEST_WORST:
        raise PrivacyError(
            f"noise of {max(streams) / grid.step:.1e} steps is finer than what is drawn is exact: sigma_ind "
            f"= {law.sigma_ind:g} and sigma_cor = {law.sigma_cor:g} are too far apart, or the model too large"
        )
    lattice = 8 * grid.dim * clients**2 * math.exp(-2 * (math.pi * SMOOTHING) ** 2 / 3)
    return Drawing(spread, worst, min(1.0, missed), lattice)
