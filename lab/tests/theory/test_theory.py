"""The bound calculators against the theorems written out, and their honesty about being vacuous."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from trilemma.aggregation import caf
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.privacy import NoiseLaw, SecretGraph, Threat, calibrate, covariance, mean_noise
from trilemma_lab.theory import (
    Heterogeneity,
    Problem,
    cafcor_theorem,
    error_term,
    lower_bound,
    non_convex_bound,
    strongly_convex_bound,
)

FAR = Heterogeneity(g=2.0, g_cov=0.7)
PROBLEM = Problem(
    dim=69, heterogeneity=FAR, smoothness=3.0, convexity=0.5, gap=0.9, variance=4.0, batch=25, examples=2764
)


def test_error_term_of_cafcor_written_out():
    n, f, kappa, ind, cor, d, b, m = 15, 4, 1.7, 0.3, 0.2, 69, 25, 2764
    sigma_b = 2 * (1 - b / m) * 4.0 / b
    slow = (sigma_b + d * (f * cor**2 + ind**2)) / (n - f)
    slow += 4 * kappa * (sigma_b + 108 * (n * cor**2 + ind**2) * (1 + d / (n - f)))
    assert error_term(PROBLEM, NoiseLaw(ind, cor), n, f, kappa) == pytest.approx(slow)


def test_error_term_of_safe_dshb_written_out():
    n, f, kappa, dp, d = 15, 4, 1.7, 0.3, 69
    sigma_b = PROBLEM.batch_variance
    slow = (sigma_b + d * dp**2) / (n - f) + 4 * kappa * (sigma_b + 36 * dp**2 * (1 + d / (n - f)))
    assert error_term(PROBLEM, NoiseLaw(dp), n, f, kappa) == pytest.approx(slow)


def test_error_term_of_trace_rules_written_out():
    n, f, kappa, ind, cor, d = 15, 4, 1.7, 0.3, 0.2, 69
    sigma_b = PROBLEM.batch_variance
    slow = (sigma_b + d * (f * cor**2 + ind**2)) / (n - f)
    slow += 4 * kappa * (sigma_b + 3 * d * (n * cor**2 + ind**2))
    assert error_term(PROBLEM, NoiseLaw(ind, cor), n, f, kappa, "trace") == pytest.approx(slow)


def test_theorem_written_out():
    kappa, error, rounds, big, mu, gap = 1.7, 5.0, 400, 3.0, 0.5, 0.9
    convex = strongly_convex_bound(PROBLEM, error, kappa, rounds)
    assert convex.heterogeneity == pytest.approx(4 * 240 * kappa * 0.7**2 / mu)
    assert convex.noise == pytest.approx(2 * 240**2 * big * error / (mu**2 * rounds))
    assert convex.start == pytest.approx(2 * 240**2 * big**2 * gap / (mu**2 * rounds**2))
    rough = non_convex_bound(PROBLEM, error, kappa, rounds)
    slow = 480 * kappa * 0.7**2 + math.sqrt(5760 * 270 * big * gap) * math.sqrt(error) / math.sqrt(rounds)
    assert rough.total == pytest.approx(slow + 270 * big * gap / rounds)
    trace = non_convex_bound(PROBLEM, error, kappa, rounds, "trace")
    assert trace.heterogeneity == pytest.approx(480 * kappa * 2.0**2)


def test_vacuous_where_not_training_does_as_well():
    kappa = caf(4).kappa(15)
    error = error_term(PROBLEM, NoiseLaw(0.3, 0.2), 15, 4, kappa)
    assert strongly_convex_bound(PROBLEM, error, kappa, 400).vacuous
    easy = replace(PROBLEM, heterogeneity=Heterogeneity(0, 0), batch=2764)
    bound = non_convex_bound(easy, error_term(easy, NoiseLaw(), 15, 0, 0.0), 0.0, 10**6)
    assert not bound.vacuous
    assert bound.total < bound.trivial


def test_more_noise_more_byzantine_and_fewer_rounds_are_worse():
    def total(sigma, f, rounds):
        kappa = caf(f).kappa(20)
        error = error_term(PROBLEM, NoiseLaw(sigma), 20, f, kappa)
        return strongly_convex_bound(PROBLEM, error, kappa, rounds).total

    base = total(0.5, 3, 100)
    assert total(0.6, 3, 100) > base
    assert total(0.5, 4, 100) > base
    assert total(0.5, 3, 90) > base


def test_heterogeneity_against_the_full_covariance():
    gradients = Key(3).numpy().standard_normal((9, 40)) @ np.diag(np.linspace(0.1, 3, 40))
    measured = Heterogeneity.measure(gradients)
    covariance = np.cov(gradients.T, bias=True)
    assert measured.g**2 == pytest.approx(np.trace(covariance))
    assert measured.g_cov**2 == pytest.approx(np.linalg.eigvalsh(covariance)[-1])
    assert Heterogeneity.measure([[1.0, 2.0]]) == Heterogeneity(0.0, 0.0)


def test_noise_in_the_honest_mean_is_what_the_covariance_leaves_in_it():
    law = NoiseLaw(0.4, 0.9)
    sigma = covariance(SecretGraph.complete(12), law, senders=range(3, 12))
    assert mean_noise(law, 12, 3) == pytest.approx(sigma.sum() / 9**2)


def test_lower_bound_written_out():
    bound = lower_bound(0.01, 1e-10, clients=7, byzantine=3, examples=2764, dim=69, g=1.5)
    assert bound.privacy == pytest.approx(69 / (1e-4 * 7 * 2764**2))
    assert bound.coupling == pytest.approx(3 / 7 / (1e-4 * 2764**2))
    assert bound.heterogeneity == pytest.approx(3 / 7 * 2.25)
    assert bound.total == bound.privacy + bound.coupling + bound.heterogeneity
    assert bound.unmet == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epsilon": 0.1}, "ε ≤"),
        ({"delta": 1e-4}, "nδ ≤"),
        ({"delta": 1e-320, "examples": 50}, "nδ ≥"),
        ({"g": 0.5}, "G ≥ 1"),
        ({"clients": 2, "byzantine": 0}, "n ≥ 3"),
    ],
)
def test_lower_bound_names_each_assumption_that_fails(change, reason):
    setting = {
        "epsilon": 0.01, "delta": 1e-10, "clients": 7, "byzantine": 3, "examples": 2764, "dim": 69, "g": 1.5
    }  # fmt: skip
    unmet = lower_bound(**{**setting, **change}).unmet
    assert len(unmet) == 1
    assert unmet[0].startswith(reason)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Heterogeneity.measure([1.0, 2.0]),
        lambda: Heterogeneity.measure([[math.nan]]),
        lambda: Problem(0, FAR),
        lambda: Problem(1, FAR, batch=3, examples=2),
        lambda: Problem(1, FAR, smoothness=1.0, convexity=2.0),
        lambda: Problem(1, FAR, gap=-1.0),
        lambda: strongly_convex_bound(Problem(1, FAR), 1.0, 1.0, 10),
        lambda: error_term(PROBLEM, NoiseLaw(), 5, 5, 1.0),
        lambda: lower_bound(0.0, 1e-5, 7, 3, 100, 10, 1.0),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(UserError):
        call()


def test_the_theorems_constants_push_everything_to_local_noise():
    law = calibrate(26.4, 1e-4, 30, 2.25, Threat("byzldp", 100, 10), objective=cafcor_theorem)
    assert law.sigma_cor == 0
    with pytest.raises(UserError, match="2f < n"):
        cafcor_theorem(Threat("secldp", 4, 2))
