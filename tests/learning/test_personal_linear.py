"""The oracles of federated linear regression: against worked numbers, simulation, and the algorithms."""

from __future__ import annotations

import linear_oracle as oracle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

WORKED = oracle.LinearFederation(
    w=np.array([[1.0, 0, 0], [0, 2, 0], [0, 0, 1], [3, 1, 1]]),
    n=10,
    b=1.0,
    sigma=1.0,
    lam=1.0,
    p=np.array([[1.0, 0, 0]]),
)


def test_worked_losses() -> None:
    found = oracle.losses(WORKED)
    assert_allclose(found.local, 0.65, atol=1e-8)
    assert_allclose(found.fedavg, [0.94375, 1.94375, 1.44375, 2.69375], atol=1e-8)
    assert_allclose(found.pfedme, [0.6671875, 0.9171875, 0.7921875, 1.1046875], atol=1e-8)
    assert_allclose(found.lp_proj, [0.621875, 0.746875, 0.746875, 1.121875], atol=1e-8)
    means = [np.mean(x) for x in (found.local, found.fedavg, found.pfedme, found.lp_proj)]
    assert_allclose(means, [0.65, 1.75625, 0.8703125, 0.809375], atol=1e-8)
    assert_allclose(oracle.best_lambdas(WORKED), [0.0923076923, 0.05], atol=1e-8)


def test_worked_fairness() -> None:
    found = oracle.fairness(WORKED)
    assert_allclose(
        [found.local, found.fedavg, found.pfedme, found.lp_proj],
        [0, 0.41796875, 0.026123046875, 0.03515625],
        atol=1e-8,
    )


@pytest.mark.parametrize(
    ("attack", "values", "lambdas"),
    [
        ("same-value", [0.65, 1.590625, 0.82890625, 0.6809895833], [0.1068249258, 0.1585903084]),
        ("gaussian", [0.65, 1.590625, 0.82890625, 0.6809895833], [0.1068249258, 0.1585903084]),
        ("sign_flip", [0.65, 2.8275961402, 1.1381490351, 0.9590484759], [0.0491245752, 0.0278046782]),
    ],
)
def test_worked_attacks(attack: oracle.Attack, values: list[float], lambdas: list[float]) -> None:
    found = oracle.attacked_losses(WORKED, attack, 2.0, [3])
    assert_allclose([found.local, found.fedavg, found.pfedme, found.lp_proj], values, atol=1e-8)
    assert_allclose(oracle.best_lambdas_attacked(WORKED, attack, 2.0, [3]), lambdas, atol=1e-8)


@pytest.mark.parametrize("attack", [None, "same-value", "gaussian", "sign_flip"])
def test_losses_agree_with_simulation(attack: oracle.Attack | None) -> None:
    """Means of 4,000 draws within five standard errors: a false alarm once in 10⁵ runs of the whole test."""
    rng, liars = np.random.default_rng(1), (3,) if attack else ()
    draws = [oracle.simulate(WORKED, rng, attack, 2.0, liars) for _ in range(4_000)]
    if attack is None:
        expected = oracle.losses(WORKED)
    else:
        expected = oracle.attacked_losses(WORKED, attack, 2.0, list(liars))
    for name in ("local", "fedavg", "pfedme", "lp_proj"):
        sample = np.array([np.mean(getattr(draw, name)) for draw in draws])
        error = sample.std() / np.sqrt(len(sample))
        assert abs(sample.mean() - np.mean(getattr(expected, name))) < 5 * error, name


def test_expected_fairness_agrees_with_simulation() -> None:
    """The corrected 2(1−1/N)(1−2/N), which the printed 4(1−2/N) misses by more than a factor of two."""
    rng = np.random.default_rng(2)
    spread = np.array([[1.0, 0.3, 0], [0.3, 2.0, 0], [0, 0, 0.5]])
    root = np.linalg.cholesky(spread)
    p = np.array([[0.6, 0.8, 0], [0, 0, 1.0]])
    draws = []
    for _ in range(5_000):
        w = rng.standard_normal((5, 3)) @ root.T
        f = oracle.LinearFederation(w, n=10, b=1.5, sigma=1.0, lam=0.7, p=p)
        found = oracle.fairness(f)
        draws.append([found.fedavg, found.pfedme, found.lp_proj])
    sample = np.array(draws)
    expected = oracle.expected_fairness(f, spread)
    error = sample.std(0) / np.sqrt(len(sample))
    target = np.array([expected.fedavg, expected.pfedme, expected.lp_proj])
    assert np.all(np.abs(sample.mean(0) - target) < 5 * error)


federations = st.builds(
    lambda seed, clients, full, n, b, sigma, lam: _uniform(seed, clients, full, n, b, sigma, lam),
    seed=st.integers(0, 10**6),
    clients=st.integers(2, 9),
    full=st.integers(2, 6),
    n=st.integers(2, 50),
    b=st.floats(0.1, 5),
    sigma=st.floats(0.1, 3),
    lam=st.floats(0.01, 20),
)


def _uniform(
    seed: int, clients: int, full: int, n: int, b: float, sigma: float, lam: float
) -> tuple[oracle.LinearFederation, float]:
    """A federation whose heterogeneity per coordinate is the same Σ in and out of the subspace."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((clients, full)) * rng.uniform(0.01, 2)
    w -= w.mean(0)
    level = np.square(w).mean(0).mean()
    w *= np.sqrt(level / np.square(w).mean(0))
    sub = int(rng.integers(1, full))
    p = np.eye(full)[:sub]
    return oracle.LinearFederation(w, n, b, sigma, lam, p), float(level)


def _means(f: oracle.LinearFederation) -> tuple[float, float, float, float]:
    found = oracle.losses(f)
    return tuple(float(np.mean(x)) for x in (found.local, found.fedavg, found.pfedme, found.lp_proj))


@given(federations)
def test_orderings_at_the_best_lambda(drawn: tuple[oracle.LinearFederation, float]) -> None:
    f, level = drawn
    best = (1 - 1 / f.clients) * f.sigma**2 / (f.n * level)
    assert_allclose(oracle.best_lambdas(f), best, rtol=1e-8)
    at_best = oracle.LinearFederation(f.w, f.n, f.b, f.sigma, best, f.p)
    loc, avg, me, l2 = _means(at_best)
    slack = 1e-9 * (1 + avg)
    assert loc >= l2 - slack >= me - 2 * slack
    assert avg >= me - slack
    _implies(best <= f.b, loc <= avg, loc, avg)
    _implies(best <= f.b * np.sqrt(f.full / (f.full - f.sub)), l2 <= avg, l2, avg)


@given(federations)
def test_orderings_at_any_lambda(drawn: tuple[oracle.LinearFederation, float]) -> None:
    f, level = drawn
    loc, avg, me, l2 = _means(f)
    q = (1 - 1 / f.clients) * f.sigma**2 / f.n
    _implies(level >= q * (2 * f.b + f.lam) / (f.lam * f.b), loc <= l2, loc, l2)
    _implies(level >= q * (2 * f.b + f.lam) / (f.lam * f.b), l2 <= me, l2, me)
    _implies(level >= q / (f.b + 2 * f.lam), me <= avg, me, avg)
    top = f.full * (f.b + f.lam) ** 2 - f.sub * f.lam * (2 * f.b + f.lam)
    bottom = f.full * (f.b + f.lam) ** 2 - f.sub * f.lam**2
    _implies(level >= q / f.b * top / bottom, l2 <= avg, l2, avg)
    assert np.sqrt((f.full - f.sub) / f.full) - 1e-12 <= top / bottom <= 1 + 1e-12


def _implies(condition: bool, holds: bool, left: float, right: float) -> None:
    """`condition` if and only if `holds`, unless the two sides are equal up to rounding."""
    if abs(left - right) > 1e-9 * (abs(left) + abs(right)):
        assert condition == holds
