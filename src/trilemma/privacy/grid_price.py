"""What it costs that drawn noise is not exactly Gaussian: a little ε and a little δ for a whole run.

Accountants assume Gaussian streams; `trilemma.privacy.secrets.streams` draws rounded ones from finite words
with finite arithmetic. N numbers are drawn in a run, over all streams, coordinates and rounds, each with a
standard deviation of at most s steps. For one of them let p(k) be the probability of ⌊N(0, s²)⌉ = k and p̃(k)
that of drawing k. They differ in three ways:

edges     A drawn number is off by at most Δ = 2⁻⁴⁶ standard deviations (compared with 40 digits, and a factor
          of two to spare), so a bin, 1/s wide, wins or loses at most Δ at either end: |log p̃/p| ≤ 4Δs.
words     θ has 2⁵⁴ values: for each u a bin's share of them is off by at most two, and u reaches the bin with
          probability e^{−x²/2} ≤ 3 s p(k): |log p̃/p| ≤ 3 · 2⁻⁵³ s. u has M values that reach a bin at x,
          at least 2⁴⁰ for |x| < 11; the share of θ that lies in the bin rises and falls once as a function of
          u and is at most √(2/(x s)), so counting instead of integrating errs by 4√s/M ≤ 2⁻³⁸√s.
tails     Beyond 11 standard deviations nothing is claimed. Probability: 3.9e-28 a number.

So within the tails |log p̃/p| ≤ a = 2⁻⁴³s + 2⁻³⁸√s, and its mean under p̃ (or log p/p̃ under p) is at most a².
By Azuma's inequality the sum over all N exceeds

    e = N a² + a √(2 N L)         with probability at most exp(−L).

Let the exact mechanism be (ε, δ)-private. Going over from drawn to exact numbers for one data set, and back
for the other, gives (ε + 2e, δ e^e + δ₁ + e^{ε+e} δ₂), where δ₁ and δ₂ bound what each way leaves out: the
tails, N · 3.9e-28, and exp(−L), chosen as 1e-13 and as 1e-13 e^{−ε}.

The lattice (`docs/privacy.md`) adds 4dT · 2m exp(−2π²ρ²/3), m < n² the number of independent cycles of
secrets: below 1e-30 wherever this library can run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trilemma.privacy.grid import SMOOTHING, Grid, in_steps
from trilemma.privacy.types import NoiseLaw

TAIL = 3.9e-28
"""Probability that a normal number is larger than 11 in size."""

_UNLIKELY = 1e-13


@dataclass(frozen=True)
class SamplerPrice:
    """What is added to a run's ε and δ."""

    epsilon: float
    delta: float


def sampler_price(
    law: NoiseLaw, grid: Grid, rounds: int, clients: int, epsilon: float, delta: float
) -> SamplerPrice:
    """Return what a run's (ε, δ) grows by because noise is drawn, as the module derives it.

    >>> from trilemma.privacy.types import Release
    >>> law = NoiseLaw(sigma_ind=0.1, sigma_cor=0.6)
    >>> grid = Grid.of(Release(clip=2.25, law=law), dim=431_080, clients=100)
    >>> price = sampler_price(law, grid, rounds=400, clients=100, epsilon=8.0, delta=1e-5)
    >>> price.epsilon < 0.03, price.delta < 2e-7
    (True, True)
    """
    streams = clients * (law.sigma_ind > 0) + clients * (clients - 1) // 2 * (law.sigma_cor > 0)
    numbers = streams * grid.dim * rounds
    steps = max(in_steps(sigma, grid.step) for sigma in (law.sigma_ind, law.sigma_cor))
    a = 2.0**-43 * steps + 2.0**-38 * math.sqrt(steps)
    rare = math.log(1 / _UNLIKELY) + epsilon
    e = numbers * a * a + a * math.sqrt(2 * numbers * rare)
    cycles = clients**2
    lattice = 8 * grid.dim * rounds * cycles * math.exp(-2 * (math.pi * SMOOTHING) ** 2 / 3)
    tails = numbers * TAIL
    left_out = (
        _UNLIKELY + tails + math.exp(min(e + epsilon, 700.0)) * (_UNLIKELY * math.exp(-epsilon) + tails)
    )
    return SamplerPrice(2 * e + lattice, delta * math.expm1(e) + left_out)
