"""From what an observer guessed to a lower bound on ε, with a stated confidence.

Three bounds, each false with probability at most `risk`:

* `clopper_pearson`: a test of one data set against another, wrong with probabilities α and β, refutes every
  (ε, δ) with 1 − β > e^ε α + δ. Nothing is assumed about the mechanism. But an ε at δ = 1e-5 is about events
  of about that probability, and 10⁴ trials see a part of it only.
* `by_shape`: right guesses of a fair coin bound the total variation between the two worlds, which is δ at
  ε = 0. If the mechanism's trade-off between ε and δ has the certified shape with some other noise (Gaussian,
  sampled as declared), that gives the noise, hence ε at any δ.
* `one_run`: m coins guessed from a single run, by Theorem 5.2 of Steinke, Nasr, Jagielski (NeurIPS 2023),
  "Privacy auditing with one (1) training run". Nothing is assumed.

References: Clopper, Pearson (1934); Nasr et al. (USENIX Security 2023), "Tight auditing of differentially
private machine learning", for bounds by shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri
from scipy.stats import binom

from trilemma.privacy.accounting.accountants import accountants
from trilemma.privacy.accounting.gaussian import gaussian_epsilon
from trilemma.privacy.mechanism import Mechanism
from trilemma.privacy.noise.drawing import EXACT

Scores = NDArray[np.float64]
Coins = NDArray[np.bool_]

_BISECTIONS = 50
_LARGEST = 200.0
"""The largest ε that is looked for."""


def at_most(hits: int, trials: int, risk: float) -> float:
    """Return the Clopper–Pearson upper bound on a probability that showed `hits` times in `trials`.

    >>> round(at_most(0, 300, 0.05), 4), at_most(3, 3, 0.05)
    (0.0099, 1.0)
    """
    return 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 1 - risk))


def at_least(hits: int, trials: int, risk: float) -> float:
    """Return the Clopper–Pearson lower bound.

    >>> round(at_least(300, 300, 0.05), 4), at_least(0, 3, 0.05)
    (0.9901, 0.0)
    """
    return 0.0 if hits <= 0 else float(betaincinv(hits, trials - hits + 1, risk))


def clopper_pearson(scores: Scores, coins: Coins, delta: float, risk: float) -> float:
    """Return a lower bound on ε at δ from scores that are large where the coin is probably heads.

    The first half of the trials chooses a threshold and a direction, the second half measures.

    >>> rng = np.random.default_rng(1)
    >>> coins = rng.random(10_000) < 0.5
    >>> flipped = coins ^ (rng.random(10_000) < 1 / (1 + math.e))  # randomised response: ε = 1
    >>> 0.85 < clopper_pearson(flipped.astype(float), coins, 0.0, 0.05) < 1.0
    True
    """
    half = len(scores) // 2
    plan, proof = slice(None, half), slice(half, None)
    levels = np.unique(np.quantile(scores[plan], _LEVELS))
    choices = [(sign, level) for sign in (1.0, -1.0) for level in levels]

    def bound(part: slice, sign: float, level: float) -> float:
        says = sign * scores[part] >= sign * level
        true = coins[part] if sign > 0 else ~coins[part]
        miss = at_most(int((~says & true).sum()), int(true.sum()), risk / 2)
        false = at_most(int((says & ~true).sum()), int((~true).sum()), risk / 2)
        return math.log(max(1 - delta - miss, 1e-300) / false)

    best = max(choices, key=lambda choice: bound(plan, *choice))
    return max(0.0, bound(proof, *best))


_TAILS = np.geomspace(1e-3, 0.5, 24)
_LEVELS = np.concatenate([_TAILS, 1 - _TAILS])


def by_shape(scores: Scores, coins: Coins, one: Mechanism, rounds: int, delta: float, risk: float) -> float:
    """Return a lower bound on ε at δ, if the curve has the shape of `rounds` rounds of `one`.

    `scores` are log-likelihood ratios: above 0 the coin was more probably heads.

    >>> rng = np.random.default_rng(2)
    >>> coins = rng.random(10_000) < 0.5
    >>> scores = rng.normal(size=10_000) + np.where(coins, 0.5, -0.5)   # N(0, 1) against N(1, 1)
    >>> certified = float(gaussian_epsilon(1.0, 1e-5))
    >>> 0.85 < by_shape(scores, coins, Mechanism(1.0), 1, 1e-5, 0.05) / certified < 1.0
    True
    """
    right = int(((scores > 0) == coins).sum())
    apart = 2 * at_least(right, len(coins), risk) - 1
    return epsilon_of_variation(apart, one, rounds, delta)


def epsilon_of_variation(apart: float, one: Mechanism, rounds: int, delta: float) -> float:
    """Return ε at δ of mechanisms like `one`, but with the noise that makes the total variation `apart`.

    >>> round(epsilon_of_variation(0.382925, Mechanism(7.0), 1, 1e-5), 3)
    4.377
    """
    if apart <= 0:
        return 0.0
    if one.gaussian:
        mu = 2 * float(ndtri((1 + apart) / 2))
        return float(gaussian_epsilon(mu, delta))
    by = accountants["pld"]

    def variation(z: float) -> float:
        return by.delta(((replace(one, z=z, drawing=EXACT), rounds),), 0.0)

    # δ by pld errs upwards: the noise found is rather too large, and the ε rather too small.
    low, high = one.z / 8, one.z * 8
    if variation(high) >= apart:
        return 0.0
    for _ in range(10):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if variation(middle) > apart else (low, middle)
    return by.epsilon(((replace(one, z=high, drawing=EXACT), rounds),), delta)


def one_run_risk(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return how probable it is, at most, that an (ε, δ)-private run lets `right` of `guesses` be right.

    >>> one_run_risk(100, 100, 60, 10.0, 0.0) > 0.99, one_run_risk(100, 100, 95, 1.0, 0.0) < 1e-4
    (True, True)
    """
    if right <= 0:
        return 1.0
    law = binom(guesses, 1 / (1 + math.exp(-epsilon)))
    steps = np.arange(1, right + 1)
    nearly = np.cumsum(law.pmf(right - steps))  # P[right − i ≤ X < right]
    leak = float((nearly / steps).max())
    return min(1.0, float(law.sf(right - 1)) + 2 * canaries * delta * leak)


def one_run(canaries: int, guesses: int, right: int, delta: float, risk: float) -> float:
    """Return the largest ε that `right` of `guesses` right guesses about `canaries` coins refute.

    >>> round(one_run(1000, 1000, 731, 0.0, 0.05), 2)  # randomised response of ε = 1, as it comes out
    0.88
    """
    return _bisected(lambda epsilon: one_run_risk(canaries, guesses, right, epsilon, delta) <= risk)


def _bisected(refuted: Callable[[float], bool]) -> float:
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _LARGEST
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
