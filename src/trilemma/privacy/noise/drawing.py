"""Noise that is drawn is not quite the noise that is accounted for: what the difference costs.

Accountants speak of Gaussian numbers with probabilities p; what is drawn has probabilities p̃. Let x = p̃/p − 1
for one draw. Four numbers say enough about all N independent draws of a run; those of rounds add up, but for
`worst`, of which the largest counts:

    spread    Σ E_p x²                     worst     b ≥ |x|
    missed    probability, under p or p̃, of draws about which nothing is claimed
    factor    a log p̃/p that is there whatever is drawn

**How far can the likelihoods of a whole run be apart?** For every order λ ≥ 1 Taylor's theorem gives

    E_p̃ (p̃/p)^λ = E_p (1 + x)^{1+λ} ≤ 1 + (1 + λ) E_p x + ½ λ(1 + λ) E_p x² e^{λb},

where E_p x is what both laws miss, and E_p (p/p̃)^λ = E_p (1 + x)^{−λ} likewise, with (1 − b)^{−λ−2} ≤
e^{1.16 (λ+2) b} for b ≤ ¼ in the last place. Draws are independent, so their logarithms add up, and by
Chernoff's bound log p̃/p of all of them together exceeds

    e = L/λ + 2 missed + ½ (1 + λ) spread e^{1.16 (λ+2) b}       with probability at most e^{−L},

under p̃, and log p/p̃ under p. The λ that makes e least may be chosen.

**What that costs.** Let the accounted mechanism be (ε, δ)-private. Go over from drawn to accounted numbers
for one data set, and back for its neighbour: what is drawn is private with

    (ε + 2e + factor,   δ e^e + δ₁ + e^{ε+e} δ₂),

δ₁ = missed + U and δ₂ = missed + U e^{−ε} being what either way leaves out, and L = log(1/U) + ε. Two laws
that are τ apart in total variation are the case missed = τ, all else zero: (ε, δ + (1 + e^ε) τ).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from trilemma.base.errors import PrivacyError

LARGEST_WORST = 0.25
"""The largest relative error of a probability for which the theorem is stated."""

_SHARE = 1e-6  # of δ, that is given to unlikely draws
_UNLIKELY = 1e-16  # the same where δ is what is asked for
_ORDERS = np.geomspace(1.0, 1e18, 500)
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Drawing:
    """How far the numbers drawn in one release are from those accounted for; none at all by default.

    >>> Drawing(spread=1e-9, worst=1e-5) + Drawing(spread=1e-9, missed=1e-20) * 2
    Drawing(spread=3.0000000000000004e-09, worst=1e-05, missed=2e-20, factor=0.0)
    """

    spread: float = 0.0
    worst: float = 0.0
    missed: float = 0.0
    factor: float = 0.0

    def __post_init__(self) -> None:
        if not (self.spread >= 0 and 0 <= self.missed <= 1 and self.factor >= 0):
            raise PrivacyError(f"no law is less than nothing away from another, or more than all: {self}")
        if not 0 <= self.worst <= LARGEST_WORST:
            raise PrivacyError(
                "the noise drawn is too far from a Gaussian to certify anything: a probability may be off by "
                f"{self.worst:.2g} of itself; allowed: up to {LARGEST_WORST:g}"
            )

    def __add__(self, other: Drawing) -> Drawing:
        return Drawing(
            self.spread + other.spread,
            max(self.worst, other.worst),
            min(1.0, self.missed + other.missed),
            self.factor + other.factor,
        )

    def __mul__(self, rounds: float) -> Drawing:
        missed = min(1.0, rounds * self.missed)
        return Drawing(rounds * self.spread, self.worst, missed, rounds * self.factor)

    @property
    def exact(self) -> bool:
        """Whether what is drawn is what is accounted for."""
        return self == EXACT


EXACT = Drawing()
"""Noise that is what it is taken for."""


def all_of(drawings: list[Drawing]) -> Drawing:
    """Return the drawing of several releases together."""
    return reduce(add, drawings, EXACT)


def likelihood(drawing: Drawing, rarity: float) -> float:
    """Return e, which the logarithm of the likelihoods' ratio exceeds with probability e^{−rarity} at most.

    >>> round(likelihood(Drawing(spread=1e-6), rarity=30.0), 4)
    0.0077
    """
    if drawing.spread == 0:
        return 0.0
    exponent = np.minimum(1.16 * (_ORDERS + 2) * drawing.worst, _LARGEST_EXPONENT / 2)
    bounds = rarity / _ORDERS + (1 + _ORDERS) / 2 * drawing.spread * np.exp(exponent)
    return 2 * drawing.missed + float(bounds.min())


@dataclass(frozen=True)
class Surcharge:
    """What a drawing takes of (ε, δ): `epsilon` is added, and `left` of δ may be spent by the accountant."""

    epsilon: float
    left: float


def surcharge(drawing: Drawing, epsilon: float, delta: float) -> Surcharge:
    """Return what is added to ε, and what is left of δ, where accounted noise costs at most `epsilon`.

    >>> surcharge(EXACT, 2.0, 1e-5)
    Surcharge(epsilon=0.0, left=1e-05)
    """
    unlikely = _SHARE * delta if drawing.spread else 0.0
    e = likelihood(drawing, epsilon - math.log(unlikely)) if unlikely else 0.0
    return Surcharge(2 * e + drawing.factor, (delta - left_out(drawing, epsilon, e, unlikely)) * math.exp(-e))


def left_out(drawing: Drawing, epsilon: float, e: float, unlikely: float) -> float:
    """Return δ₁ + e^{ε+e} δ₂, with U = `unlikely`.

    >>> left_out(Drawing(missed=1e-9), epsilon=0.0, e=0.0, unlikely=0.0)
    2e-09
    """
    grown = math.exp(min(epsilon + e, _LARGEST_EXPONENT)) * drawing.missed
    return drawing.missed + unlikely + grown + math.exp(e) * unlikely


def drawn_delta(drawing: Drawing, epsilon: float) -> tuple[float, float, float]:
    """Return what is left of ε for the accountant, by what its δ is multiplied, and what is added to it.

    >>> drawn_delta(Drawing(missed=1e-9), 0.0)
    (0.0, 1.0, 2e-09)
    """
    unlikely = _UNLIKELY if drawing.spread else 0.0
    e = likelihood(drawing, epsilon - math.log(unlikely)) if unlikely else 0.0
    left = epsilon - 2 * e - drawing.factor
    return left, math.exp(e), left_out(drawing, epsilon, e, unlikely)
