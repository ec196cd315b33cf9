"""Byz-Clip21's theorems: measured runs stay below them, and they are about something."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from trilemma.aggregation import caf
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma_lab.theory import Heterogeneity, Problem, clipped_order, momentum_bound

DIM, HONEST, ROUNDS = 10, 8, 300


@dataclass(frozen=True)
class Quadratics:
    """f_i(x) = ½ (x − c_i)ᵀ A (x − c_i): ζ is the same at every x, and all constants are known."""

    a: np.ndarray
    centres: np.ndarray

    @classmethod
    def drawn(cls, apart: float, seed: int) -> Quadratics:
        rng = Key(seed).numpy()
        return cls(np.linspace(0.1, 1.0, DIM), apart * rng.standard_normal((HONEST, DIM)))

    def gradients(self, x: np.ndarray) -> np.ndarray:
        return self.a * (x - self.centres)

    def problem(self, start: np.ndarray, sigma: float) -> Problem:
        """Return its constants: L = 1, and f(x) − f* about the mean of the centres."""
        far = self.gradients(start)
        zeta = math.sqrt(((far - far.mean(0)) ** 2).sum(1).mean())
        gap = 0.5 * (self.a * (start - self.centres.mean(0)) ** 2).sum()
        # E exp(‖θ‖²/σ²) ≤ e for θ ~ N(0, s² I)
        subgaussian = 2 * sigma**2 / (1 - math.exp(-2 / DIM))
        far_apart = Heterogeneity(zeta, zeta)
        return Problem(DIM, far_apart, smoothness=1.0, gap=float(gap), variance=subgaussian)


def measured(
    task: Quadratics, start: np.ndarray, lr: float, beta: float, sigma: float, liars: int, seed: int
) -> float:
    """Run Byz-SGDM with CAF, liars sending −10 times the honest mean; return the mean of ‖∇f‖²."""
    rng, rule = Key(seed).numpy(), caf(liars)
    x, v, total = start, np.zeros((HONEST, DIM)), 0.0
    for _ in range(ROUNDS):
        total += float((task.gradients(x).mean(0) ** 2).sum())
        noisy = task.gradients(x) + sigma * rng.standard_normal((HONEST, DIM))
        v = (1 - beta) * v + beta * noisy
        sent = np.concatenate([v, np.repeat(-10 * v.mean(0, keepdims=True), liars, 0)])
        x = x - lr * rule(torch.from_numpy(sent)).value.numpy()
    return total / ROUNDS


@pytest.mark.parametrize("liars", [0, 2])
@pytest.mark.parametrize("sigma", [0.0, 0.05])
@pytest.mark.parametrize("apart", [0.0, 0.3])
def test_measured_runs_stay_below_theorem_5_2(liars: int, sigma: float, apart: float) -> None:
    kappa = caf(liars).kappa(HONEST + liars) if liars else 0.0
    for seed, beta in ((1, 1.0), (2, 0.5), (3, 0.1)):
        task, start = Quadratics.drawn(apart, seed), np.full(DIM, 2.0)
        problem = task.problem(start, sigma)
        bound = momentum_bound(problem, HONEST + liars, liars, kappa, ROUNDS, beta / 2, beta)
        found = measured(task, start, beta / 2, beta, sigma, liars, seed)
        assert found <= bound.total
        if not (liars or sigma):
            assert bound.total < 100 * found, (
                "without noise and liars it is within two orders of what happens"
            )
            assert not bound.vacuous


def test_a_step_that_is_too_long_can_leave_the_bound_behind_and_is_refused() -> None:
    """Not every γ is admitted: with γ = 2.5/L the run diverges, past what the formula would have said."""
    task, start = Quadratics.drawn(0.0, 1), np.full(DIM, 2.0)
    problem = task.problem(start, 0.0)
    would_be = 4 * problem.gap / (2.5 * ROUNDS)
    assert measured(task, start, 2.5, 1.0, 0.0, 0, 1) > would_be
    with pytest.raises(UserError, match=r"γ ≤ β/\(2L\) = 0.5"):
        momentum_bound(problem, HONEST, 0, 0.0, ROUNDS, 2.5, 1.0)


def test_theorem_5_2_written_out() -> None:
    """B of the docstring solves its own equation."""
    problem = Problem(DIM, Heterogeneity(0.7, 0.7), smoothness=2.0, gap=0.9, variance=0.3)
    lr, beta, kappa, f, n, alpha = 0.05, 0.4, 1.7, 3, 11, 0.1
    big = momentum_bound(problem, n, f, kappa, ROUNDS, lr, beta, alpha).total * lr * ROUNDS / 2
    s = (math.sqrt(2) + 2 * math.sqrt(3 * math.log(3 * ROUNDS * (n - f) / alpha))) * math.sqrt(0.3)
    v = 2 * 0.7**2 + 2 * beta * s**2
    u = (1 + lr * 2) * math.sqrt(beta * big / lr) + lr * 2 * (math.sqrt(4 * big) + math.sqrt(kappa * v))
    again = 2 * 0.9 + lr * beta * ROUNDS * s**2 / (n - f) + lr * kappa * ROUNDS * v
    assert again + 2 * lr * (1 - beta) * s * u * math.sqrt(ROUNDS / (n - f)) == pytest.approx(big)


def private(task: Quadratics, x: np.ndarray, noise: float, liars: int, seed: int) -> float:
    """Run Byz-Clip21-SGD2M, β̂ ~ 1/T as it asks, noise per τ; return the mean of ‖∇f‖² along the run."""
    clip, beta, beta_hat, lr = 1.0, 0.1, 1 / ROUNDS * 10, 0.05
    rng, rule = Key(seed).numpy(), caf(liars)
    v = g = m = np.zeros((HONEST, DIM))
    total = 0.0
    for _ in range(ROUNDS):
        total += float((task.gradients(x).mean(0) ** 2).sum())
        v = (1 - beta) * v + beta * (task.gradients(x) + 0.05 * rng.standard_normal((HONEST, DIM)))
        u = v - g
        u = u * np.minimum(1, clip / np.linalg.norm(u, axis=1, keepdims=True).clip(1e-12))
        g = g + beta_hat * u
        m = m + beta_hat * (u + clip * noise * rng.standard_normal((HONEST, DIM)))
        sent = np.concatenate([m, np.repeat(-10 * m.mean(0, keepdims=True), liars, 0)])
        x = x - lr * rule(torch.from_numpy(sent)).value.numpy()
    return total / ROUNDS


@pytest.mark.parametrize("liars", [0, 2])
@pytest.mark.parametrize("noise", [0.0, 0.5, 5.0])
def test_measured_private_runs_stay_below_the_orders_of_theorems_5_1_and_d_1(
    noise: float, liars: int
) -> None:
    """With all hidden constants taken as 1."""
    kappa = caf(liars).kappa(HONEST + liars) if liars else 0.0
    for seed in (1, 2, 3):
        task, x = Quadratics.drawn(0.1, seed), np.full(DIM, 2.0)
        problem = task.problem(x, 0.05)
        longest = float(np.linalg.norm(task.gradients(x), axis=1).max())
        known = (problem, HONEST + liars, liars, kappa, ROUNDS, 1.0, noise)
        found = private(task, x, noise, liars, seed)
        decays = problem.smoothness * problem.gap  # what falls with T has not fallen yet
        assert found <= clipped_order(*known).total + decays
        assert found <= clipped_order(*known, longest).total + decays


def test_theorem_5_1_written_out_and_in_its_parts() -> None:
    problem = Problem(DIM, Heterogeneity(0.7, 0.7), smoothness=2.0, gap=0.9, variance=0.25)
    found = clipped_order(problem, 11, 3, 1.7, 400, 0.1, 0.3)
    assert found.privacy == pytest.approx(math.sqrt(DIM) * 0.3 / (math.sqrt(8 * 400) * 0.1))
    assert found.coupling == pytest.approx(math.sqrt(1.7 * DIM) * 0.3 / (math.sqrt(400) * 0.1))
    assert found.liars == pytest.approx(math.sqrt(1.7))
    assert found.scale == pytest.approx(1.8 + 0.49 + 0.5 * (math.sqrt(1.8) + 0.7))
    b = 0.5 * math.sqrt(2 * math.log(16 * 401 * 8 / 0.05))
    level = math.sqrt(1.8 + 0.49)
    full = clipped_order(problem, 11, 3, 1.7, 400, 0.1, 0.3, longest=2.0)
    assert full.ratio == found.ratio
    assert full.scale == pytest.approx(level * (level + 2.0 + b + 0.5))
    assert clipped_order(problem, 11, 3, 1.7, 400, 9.0, 0.3, longest=2.0).scale == pytest.approx(
        level * (level + 27.0 + 0.5)
    )
    alone = clipped_order(replace(problem, variance=0.0), 11, 0, 0.0, 400, 0.1, 0.0)
    assert alone.total == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda p: momentum_bound(p, 5, 5, 1.0, 10, 0.1, 0.5),
        lambda p: momentum_bound(p, 5, 0, -1.0, 10, 0.1, 0.5),
        lambda p: momentum_bound(p, 5, 0, 1.0, 0, 0.1, 0.5),
        lambda p: momentum_bound(p, 5, 0, 1.0, 10, 0.1, 0.5, failure=0.0),
        lambda p: clipped_order(p, 5, 0, 1.0, 10, 0.0, 0.5),
        lambda p: clipped_order(p, 5, 0, 1.0, 10, 1.0, math.nan),
        lambda p: clipped_order(p, 5, 0, 1.0, 10, 1.0, 0.1, longest=-1.0),
        lambda p: clipped_order(p, 5, 0, 1.0, 10, 1.0, 0.1, longest=1.0, failure=1.0),
    ],
)
def test_bad_input_is_refused(call) -> None:
    with pytest.raises(UserError):
        call(Problem(1, Heterogeneity(0, 0)))
