"""Byz-Clip21-SGD2M: Theorem 5.2 with its constants, Theorems 5.1 and D.1 in order.

**Theorem 5.2** (E.1), momentum β and a robust rule, no clipping, no noise for privacy (Byz-SGDM). G honest
clients; F⁰ = f(x⁰) − f*; clients' gradients differ by ζ from their mean, stochastic ones by σ-sub-Gaussian
noise; ‖R − mean‖² ≤ κ · variance of honest messages. For β ≤ 1 and γ ≤ β/(2L), with probability 1 − α,

    (1/T) Σ ‖∇f(xᵗ)‖² ≤ 2B/(γT),   B = 2F⁰ + γβTs²/G + γκTV + 2γ(1−β) s U √(T/G),
    V = 2ζ² + 2βs²,                the variance of honest momenta,
    U = (1+γL)√(βB/γ) + γL(√(2LB) + √(κV)),   the error of their mean,
    s = (√2 + 2√(3 log(3TG/α))) σ.

The paper prints the order alone, Õ(LF⁰/T + σ(√(LF⁰) + …)/√(GT) + κζ²). Its proof gives the constants above:
with Φ = f(xᵗ) − f* + (γ/β)‖v̄ᵗ − ∇f(xᵗ)‖² the descent lemma and the recursion of v̄ have

    Φᵗ⁺¹ ≤ Φᵗ − (γ/2)‖∇f(xᵗ)‖² − (1/(4γ) − γL²/β²)‖xᵗ⁺¹ − xᵗ‖² + γκVᵗ
           + 2γ(1−β)⟨uᵗ, θ̄ᵗ⁺¹⟩ + γβ‖θ̄ᵗ⁺¹‖²,   Φ before the first message ≤ 2F⁰,

and its Lemma 2 bounds each sum of noise by s; uᵗ ≤ U while Φ ≤ B, by induction. B solves a quadratic
equation.

**Theorem 5.1** (D.1), clipping at τ and noise of deviation σ_ω: with probability 1 − α, up to constants and
logarithms that the paper does not give, and up to terms that fall with T,

    (1/T) Σ ‖∇f(xᵗ)‖² ≤ Δ₀ (R + R^⅔),   R = √d σ_ω/(√(GT) τ) + √(κd) σ_ω/(√T τ) + √κ,
    Δ₀ = LF⁰ + ζ² + σ(√(LF⁰) + ζ)

(the paper's cδ is κ here, up to a factor). **Theorem D.1**, its full statement, needs no ζ that holds
everywhere, and has in the place of Δ₀

    √(LΔ) (√(LΔ) + B + σ),   LΔ = LF⁰ + ζ² at the start,
    B = max(3τ, max_i ‖∇f_i(x⁰)‖ + b),   b = σ √(2 log(16(T+1)G/α)),

B with the constants that it prints. The first term of R is privacy's, the second what liars make of it, the
third theirs alone. At the paper's noise, σ_ω = τ√(T log(1/δ))/ε, R has no T left: Corollary 5.1.

Reference: Byz-Clip21-SGD2M (Byzantine robustness, clipping, double momentum and differential privacy),
Theorems 5.1, 5.2, D.1 and E.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trilemma.base.errors import UserError
from trilemma_lab.theory.bounds import Problem, Upper, check_number


def momentum_bound(
    problem: Problem,
    clients: int,
    byzantine: int,
    kappa: float,
    rounds: int,
    lr: float,
    beta: float,
    failure: float = 0.05,
) -> Upper:
    """Return Theorem 5.2's bound on the mean of ‖∇f(xᵗ)‖², which holds with probability 1 − `failure`.

    `problem.variance` is σ², `problem.heterogeneity.g` ζ; batches are part of σ. Without noise, liars and
    heterogeneity what is left is the influence of the start:

    >>> from trilemma_lab.theory.bounds import Heterogeneity
    >>> easy = Problem(dim=1, heterogeneity=Heterogeneity(0, 0), variance=0.0)
    >>> bound = momentum_bound(easy, clients=5, byzantine=0, kappa=0.0, rounds=1000, lr=0.25, beta=0.5)
    >>> round(bound.total, 6)
    0.016
    """
    _check(clients, byzantine, kappa, rounds)
    honest, big, gap = clients - byzantine, problem.smoothness, problem.gap
    if not (0 < beta <= 1 and 0 < lr <= beta / (2 * big)):
        raise UserError(
            f"Theorem 5.2 needs 0 < β ≤ 1 and 0 < γ ≤ β/(2L) = {beta / (2 * big):g}, got {beta}, {lr}"
        )
    _check_failure(failure)
    events = 3 * math.log(3 * rounds * honest / failure)
    noise = (math.sqrt(2) + 2 * math.sqrt(events)) * math.sqrt(problem.variance)
    spread = 2 * problem.heterogeneity.g**2 + 2 * beta * noise**2
    drift = 2 * lr * (1 - beta) * noise * math.sqrt(rounds / honest)
    linear = drift * ((1 + lr * big) * math.sqrt(beta / lr) + lr * big * math.sqrt(2 * big))
    constant = (
        2 * gap
        + lr * beta * rounds * noise**2 / honest
        + lr * kappa * rounds * spread
        + drift * lr * big * math.sqrt(kappa * spread)
    )
    root = (linear + math.sqrt(linear**2 + 4 * constant)) / 2
    start = 4 * gap / (lr * rounds)
    apart = 4 * kappa * problem.heterogeneity.g**2
    total = 2 * root**2 / (lr * rounds)
    return Upper(apart, max(0.0, total - apart - start), start, trivial=2 * big * gap)


@dataclass(frozen=True)
class Neighbourhood:
    """Theorem 5.1 without constants and logarithms: its three terms, and Δ₀.

    >>> Neighbourhood(0.5, 0.3, 0.2, scale=2.0).total
    4.0
    """

    privacy: float
    coupling: float
    liars: float
    scale: float

    @property
    def ratio(self) -> float:
        """R."""
        return self.privacy + self.coupling + self.liars

    @property
    def total(self) -> float:
        """Δ₀ (R + R^⅔), an order of magnitude."""
        return self.scale * (self.ratio + math.pow(self.ratio, 2 / 3))


def clipped_order(
    problem: Problem,
    clients: int,
    byzantine: int,
    kappa: float,
    rounds: int,
    clip: float,
    sigma: float,
    longest: float | None = None,
    failure: float = 0.05,
) -> Neighbourhood:
    """Return Theorem 5.1's neighbourhood in order: noise of deviation `sigma` on vectors clipped at `clip`.

    With `longest`, max_i ‖∇f_i(x⁰)‖, Theorem D.1's, which holds with probability 1 − `failure`. At the
    paper's noise 5.1's does not depend on the number of rounds:

    >>> from trilemma_lab.theory.bounds import Heterogeneity
    >>> problem = Problem(dim=100, heterogeneity=Heterogeneity(0, 0))
    >>> paper = [
    ...     clipped_order(problem, 25, 0, 0.0, t, 0.01, 0.01 * math.sqrt(t * math.log(1 / 4e-4)) / 13)
    ...     for t in (100, 10_000)
    ... ]
    >>> [round(one.privacy, 4) for one in paper]
    [0.4303, 0.4303]
    """
    _check(clients, byzantine, kappa, rounds)
    check_number("sigma", sigma)
    if not clip > 0:
        raise UserError(f"clip = {clip}: allowed are positive numbers")
    honest, zeta = clients - byzantine, problem.heterogeneity.g
    level, spread = math.sqrt(problem.smoothness * problem.gap), math.sqrt(problem.variance)
    noise = math.sqrt(problem.dim / rounds) * sigma / clip
    scale = level**2 + zeta**2 + spread * (level + zeta)
    if longest is not None:
        check_number("longest", longest)
        _check_failure(failure)
        first = math.hypot(level, zeta)
        tail = spread * math.sqrt(2 * math.log(16 * (rounds + 1) * honest / failure))
        scale = first * (first + max(3 * clip, longest + tail) + spread)
    return Neighbourhood(noise / math.sqrt(honest), math.sqrt(kappa) * noise, math.sqrt(kappa), scale)


def _check_failure(failure: float) -> None:
    if not 0 < failure < 1:
        raise UserError(f"failure = {failure}: allowed are numbers between 0 and 1")


def _check(clients: int, byzantine: int, kappa: float, rounds: int) -> None:
    if not 0 <= byzantine < clients or kappa < 0 or rounds < 1:
        raise UserError(
            f"0 ≤ f < n, κ ≥ 0 and one round or more are needed, got f = {byzantine}, n = {clients}, "
            f"κ = {kappa}, {rounds} rounds"
        )
