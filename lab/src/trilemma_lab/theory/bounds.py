"""The papers' error bounds with all their constants, and when they say nothing.

Upper bounds are Theorem 4.2 of SAFE-DSHB (Allouah, Guerraoui, Gupta, Pinot, Stephan, ICML 2023) and Theorem
4.2 of CafCor (Allouah, Guerraoui, Stephan, ICML 2025); the latter's statement hides constants that its
appendix C.3 gives. Both end, for a rule of coefficient κ and the error term σ̄², in

    strongly convex:  E[L(θ_T) − L*] ≤ 4a₁κG²_cov/μ + 2a₁²Lσ̄²/(μ²T) + 2a₁²L²L₀/(μ²T²)
    non-convex:       E‖∇L(θ̂)‖²      ≤ a₂κG²_cov + √(a₃a₄LL₀)σ̄/√T + a₄LL₀/T,

a₁ … a₄ = 240, 480, 5760, 270. They differ in σ̄² (`error_term`). Rules whose κ is proven against the trace
of the honest covariance, not its largest eigenvalue, get G² for G²_cov and the trace version of σ̄²
(CafCor, appendix C.5).

The lower bound is Theorem 3.1 of SAFE-DSHB, without its hidden constant and logarithms.

The constants of proofs are large. A bound that is no better than that of no training at all says nothing; it
is `Upper.vacuous`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from trilemma.aggregation.steps.types import Criterion
from trilemma.base.errors import UserError
from trilemma.learning.steps.schedules import A3, A4
from trilemma.privacy import NoiseLaw, mean_noise
from trilemma.privacy.types import SMALLEST

_A1, _A2 = 240.0, 480.0


def check_number(name: str, number: float) -> None:
    """Raise a `UserError` for a number that is negative, NaN, or too large or too small to be squared.

    >>> check_number("gap", 1e300)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: gap = 1e+300: allowed are 0 and 1e-100 to 1e+100
    """
    if not (number == 0 or SMALLEST <= number <= 1 / SMALLEST):
        raise UserError(f"{name} = {number:g}: allowed are 0 and {SMALLEST:g} to {1 / SMALLEST:g}")


def _check_rounds(rounds: int) -> None:
    if rounds < 1:
        raise UserError(f"theorems are about 1 round or more, got {rounds}")


@dataclass(frozen=True)
class Heterogeneity:
    """How far clients' gradients are from their mean: `g` and `g_cov` as in Assumption 2.1, not squared.

    Measured at one model, they are lower estimates of the suprema over all models that theorems use.
    """

    g: float
    g_cov: float

    def __post_init__(self) -> None:
        check_number("G", self.g)
        check_number("G_cov", self.g_cov)

    @classmethod
    def measure(cls, gradients: ArrayLike) -> Heterogeneity:
        """Measure on the honest clients' full gradients (clients, d) at one model.

        G² is the trace of their covariance, G²_cov its largest eigenvalue, read off the small Gram matrix.

        >>> Heterogeneity.measure([[3.0, 0.0], [-3.0, 0.0], [0.0, 0.0]])
        Heterogeneity(g=2.449489742783178, g_cov=2.449489742783178)
        """
        x = np.asarray(gradients, float)
        if x.ndim != 2 or len(x) == 0 or not np.isfinite(x).all():
            raise UserError("heterogeneity is measured on finite gradients of shape (clients, d)")
        centred = x - x.mean(axis=0)
        spectrum = np.linalg.eigvalsh(centred @ centred.T / len(x))
        return cls(math.sqrt(max(0.0, spectrum.sum())), math.sqrt(max(0.0, spectrum[-1])))

    @classmethod
    def load(cls, path: Path) -> Heterogeneity:
        """Measure on the gradients in a .npy file."""
        try:
            found = np.load(path, allow_pickle=False)
        except OSError as error:
            raise UserError(f"no gradients in {path}: {error.strerror or error}") from None
        except (ValueError, EOFError):
            found = None
        # An archive of arrays is loaded too, and so are arrays of texts, records and complex numbers.
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iuf":
            raise UserError(f"no gradients in {path}: it is no .npy file of numbers")
        return cls.measure(found)


@dataclass(frozen=True)
class Problem:
    """The learning problem as theorems see it.

    `smoothness` is L, `convexity` μ (0: not strongly convex), `gap` L₀ = L(θ₀) − L*, `variance` the bound
    σ² on the variance of one example's gradient, of which `batch` out of `examples` are averaged.
    """

    dim: int
    heterogeneity: Heterogeneity
    smoothness: float = 1.0
    convexity: float = 0.0
    gap: float = 1.0
    variance: float = 1.0
    batch: int = 1
    examples: int = 1

    def __post_init__(self) -> None:
        if self.dim < 1 or not 1 <= self.batch <= self.examples:
            raise UserError(
                f"d ≥ 1 and 1 ≤ batch ≤ examples are needed, got {self.dim}, {self.batch}, {self.examples}"
            )
        if not 0 <= self.convexity <= self.smoothness or self.smoothness <= 0:
            raise UserError(
                f"0 ≤ convexity ≤ smoothness, 0 < smoothness; got {self.convexity} and {self.smoothness}"
            )
        for name in ("smoothness", "convexity", "gap", "variance"):
            check_number(name, getattr(self, name))

    @property
    def batch_variance(self) -> float:
        """σ_b² = 2(1 − b/m)σ²/b, the variance that sampling a batch without replacement leaves."""
        return 2 * (1 - self.batch / self.examples) * self.variance / self.batch


@dataclass(frozen=True)
class Upper:
    """An upper bound as the sum of its three terms: heterogeneity, noise, and the influence of the start.

    >>> Upper(1.0, 2.0, 0.5, trivial=3.0).total, Upper(1.0, 2.0, 0.5, trivial=3.0).vacuous
    (3.5, True)
    """

    heterogeneity: float
    noise: float
    start: float
    trivial: float
    """What holds without any training: L₀, or 2L·L₀ for a squared gradient norm."""

    @property
    def total(self) -> float:
        """The bound."""
        return self.heterogeneity + self.noise + self.start

    @property
    def vacuous(self) -> bool:
        """Whether no training at all is guaranteed to do as well."""
        return not self.total < self.trivial


def error_term(
    problem: Problem,
    law: NoiseLaw,
    clients: int,
    byzantine: int,
    kappa: float,
    criterion: Criterion = "spectral",
) -> float:
    """Return σ̄², the error that sampling and noise cause in a round.

        CafCor:      [σ_b² + d(fσ_cor² + σ_ind²)]/(n−f) + 4κ[σ_b² + 108(nσ_cor² + σ_ind²)(1 + d/(n−f))]
        SAFE-DSHB:   the same with σ_cor = 0, and the constant 36 instead of 108
        trace rules: the second term is 4κ[σ_b² + 3d(nσ_cor² + σ_ind²)]

    >>> still = Problem(dim=69, heterogeneity=Heterogeneity(0, 0), batch=25, examples=25)
    >>> round(error_term(still, NoiseLaw(0.08), clients=7, byzantine=0, kappa=0.0), 4)
    0.0631
    """
    honest = clients - byzantine
    if not 0 <= byzantine < clients or kappa < 0:
        raise UserError(f"0 ≤ f < n and κ ≥ 0 are needed, got f = {byzantine}, n = {clients}, κ = {kappa}")
    spread = clients * law.sigma_cor**2 + law.sigma_ind**2
    if criterion == "trace":
        drift = 3 * problem.dim * spread
    else:
        drift = (36 if law.sigma_cor == 0 else 108) * spread * (1 + problem.dim / honest)
    left = problem.batch_variance / honest + problem.dim * mean_noise(law, clients, byzantine)
    return left + 4 * kappa * (problem.batch_variance + drift)


def strongly_convex_bound(
    problem: Problem, error: float, kappa: float, rounds: int, criterion: Criterion = "spectral"
) -> Upper:
    """Return the bound on E[L(θ_T) − L*] after `rounds` rounds with σ̄² = `error`.

    The theorem's schedules are γ_t = 10/(μ(t + 240L/μ)) and β_t = 1 − 24Lγ_t.

    >>> easy = Problem(dim=1, heterogeneity=Heterogeneity(0, 0), convexity=1.0)
    >>> strongly_convex_bound(easy, error=0.0, kappa=0.0, rounds=1000).total
    0.1152
    """
    mu, big = problem.convexity, problem.smoothness
    _check_rounds(rounds)
    if mu == 0:
        raise UserError("this bound is for strongly convex losses: give convexity > 0")
    return Upper(
        4 * _A1 * kappa * _divergence(problem, criterion) / mu,
        2 * _A1**2 * big * error / (mu**2 * rounds),
        2 * _A1**2 * big**2 * problem.gap / (mu**2 * rounds**2),
        trivial=problem.gap,
    )


def non_convex_bound(
    problem: Problem, error: float, kappa: float, rounds: int, criterion: Criterion = "spectral"
) -> Upper:
    """Return the bound on E‖∇L(θ̂)‖² for θ̂ a random one of `rounds` iterates, σ̄² = `error`.

    The theorem's schedules are γ = min{1/(24L), √(a₄L₀)/(2σ̄√(a₃LT))} and β = 1 − 24Lγ.

    >>> easy = Problem(dim=1, heterogeneity=Heterogeneity(0, 0))
    >>> non_convex_bound(easy, error=0.0, kappa=0.0, rounds=1000).total
    0.27
    """
    _check_rounds(rounds)
    big, gap = problem.smoothness, problem.gap
    return Upper(
        _A2 * kappa * _divergence(problem, criterion),
        math.sqrt(A3 * A4 * big * gap * error / rounds),
        A4 * big * gap / rounds,
        trivial=2 * big * gap,
    )


def _divergence(problem: Problem, criterion: Criterion) -> float:
    far = problem.heterogeneity.g if criterion == "trace" else problem.heterogeneity.g_cov
    return far**2


@dataclass(frozen=True)
class Lower:
    """Theorem 3.1 without constants and logarithms: no private and robust algorithm does better in order.

    `unmet` lists the theorem's assumptions that the setting violates; with any, it proves nothing here.
    """

    privacy: float
    coupling: float
    heterogeneity: float
    unmet: tuple[str, ...]

    @property
    def total(self) -> float:
        """The bound's order of magnitude."""
        return self.privacy + self.coupling + self.heterogeneity


def lower_bound(
    epsilon: float, delta: float, clients: int, byzantine: int, examples: int, dim: int, g: float
) -> Lower:
    """Return d/(ε²nm²) + (f/n)/(ε²m²) + (f/n)G², example-level privacy, m examples per client.

    >>> bound = lower_bound(0.01, 1e-9, clients=7, byzantine=3, examples=2764, dim=69, g=1.0)
    >>> round(bound.privacy, 3), bound.unmet
    (0.013, ())
    >>> lower_bound(1.0, 1e-4, clients=7, byzantine=3, examples=2764, dim=69, g=0.5).unmet
    ('ε ≤ 1/(4√(2n ln(m+1))) = 0.0237', 'nδ ≤ 1/(8m^(1+γ)) for a γ in (0, 1)', 'G ≥ 1')
    """
    n, f, m = clients, byzantine, examples
    if not (epsilon > 0 and 0 < delta < 1 and n >= 1 and 0 <= 2 * f < n and m >= 1 and dim >= 1 and g >= 0):
        raise UserError("a lower bound needs ε > 0, 0 < δ < 1, 0 ≤ f < n/2, m ≥ 1, d ≥ 1, G ≥ 0")
    check_number("ε", epsilon)
    privacy, coupling = dim / (epsilon**2 * n * m**2), f / n / (epsilon**2 * m**2)
    largest = 1 / (4 * math.sqrt(2 * n * math.log(m + 1)))
    assumptions = {
        "n ≥ 3": n >= 3,
        f"ε ≤ 1/(4√(2n ln(m+1))) = {largest:.3g}": epsilon <= largest,
        "nδ ≤ 1/(8m^(1+γ)) for a γ in (0, 1)": n * delta < 1 / (8 * m),
        "nδ ≥ 2^(−m^(1−γ)) for the same γ": _some_gamma(n * delta, m),
        "G ≥ 1": g >= 1,
    }
    unmet = tuple(name for name, holds in assumptions.items() if not holds)
    if assumptions["nδ ≤ 1/(8m^(1+γ)) for a γ in (0, 1)"] is False:
        unmet = tuple(name for name in unmet if not name.startswith("nδ ≥"))
    return Lower(privacy, coupling, f / n * g**2, unmet)


def _some_gamma(n_delta: float, m: int) -> bool:
    """Tell whether one γ in (0, 1) meets both of the theorem's conditions on nδ."""
    gammas = np.linspace(0, 1, 1001)[1:-1]
    small_enough = n_delta <= 1 / (8.0 * m ** (1 + gammas))
    large_enough = math.log2(n_delta) >= -(float(m) ** (1 - gammas))
    return bool((small_enough & large_enough).any())
