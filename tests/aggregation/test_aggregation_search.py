"""Rules that search: SMEA and MDA against enumeration, within and beyond budgets; the geometric median."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from trilemma import aggregation as agg
from trilemma.aggregation.mda import tightest
from trilemma.aggregation.smea import least_scatter

smea_module = sys.modules["trilemma.aggregation.smea"]


def messages(n: int, d: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)) * rng.uniform(0.2, 3, d)


def top_variance(X: np.ndarray) -> float:
    return float(np.linalg.svd(X - X.mean(axis=0), compute_uv=False)[0] ** 2 / len(X))


def smallest_top_variance(X: np.ndarray, f: int) -> float:
    return min(top_variance(X[list(S)]) for S in itertools.combinations(range(len(X)), len(X) - f))


@pytest.mark.parametrize(
    ("n", "f", "d"), [(5, 2, 1), (9, 4, 2), (10, 3, 40), (12, 5, 5), (14, 2, 3), (8, 1, 1000)]
)
@pytest.mark.parametrize("together", [True, False], ids=["enumerated", "search tree"])
def test_smea_finds_the_best_subset(n: int, f: int, d: int, together: bool, monkeypatch: pytest.MonkeyPatch):
    if not together:
        monkeypatch.setattr(smea_module, "NUMBERS", 10 * n)
    for seed in range(5):
        X = messages(n, d, seed)
        out = agg.smea(f=f)(X)
        best = smallest_top_variance(X, f)
        assert out.info.exact
        assert top_variance(X[out.weights > 0]) == pytest.approx(best, rel=1e-9)
        assert out.info.objective == pytest.approx(best, rel=1e-9)
        assert out.info.lower_bound == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_smea_is_exact_beside_a_row_that_is_far_away(seed: int):
    X = messages(11, 300, seed)
    X[-1] = 1e24
    out = agg.smea(f=2)(X)
    assert out.info.exact
    assert top_variance(X[np.flatnonzero(out.weights)]) <= smallest_top_variance(X[:-1], 1) * (1 + 1e-9)


@pytest.mark.parametrize("budget", [1, 30, 500])
def test_smea_beyond_its_budget_says_so_and_bounds_the_optimum(budget: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smea_module, "NUMBERS", 200)
    bounds = []
    for seed in range(5):
        X = messages(12, 3, seed)
        out = agg.smea(f=5, budget=budget)(X)
        info, kept = out.info, X[np.flatnonzero(out.weights)]
        best = smallest_top_variance(X, 5)
        assert info.lower_bound <= best * (1 + 1e-9) <= info.objective * (1 + 2e-9)
        assert info.objective == pytest.approx(top_variance(kept))
        np.testing.assert_allclose(out.value, kept.mean(axis=0), atol=1e-9)
        bounds.append(info.exact)
    assert not all(bounds) or budget > 30


def test_smea_runs_out_of_seconds():
    X = messages(60, 10, 0)
    info = agg.smea(f=20, seconds=0.2)(X).info
    assert not info.exact
    assert 0 <= info.lower_bound <= info.objective


def test_smea_with_symmetric_messages():
    """All subsets are equally good: the search must end all the same."""
    out = agg.smea(f=3)(np.eye(12))
    assert out.info.exact
    assert np.count_nonzero(out.weights) == 9


def test_least_scatter_is_the_least():
    rng = np.random.default_rng(1)
    for _ in range(50):
        values, free = rng.standard_normal(8), rng.random(8) < 0.7
        count = int(rng.integers(0, free.sum() + 1))
        options = [
            np.var(np.delete(values, gone)) * (8 - count)
            for gone in itertools.combinations(np.flatnonzero(free), count)
            if count < 8
        ]
        if options:
            assert least_scatter(values, free, count) == pytest.approx(min(options), abs=1e-12)


@pytest.mark.parametrize(("n", "f"), [(4, 1), (8, 3), (11, 5), (12, 2)])
def test_mda_finds_the_smallest_diameter(n: int, f: int):
    for seed in range(10):
        X = messages(n, 2, seed)
        D = np.square(X[:, None] - X[None]).sum(axis=2)
        best = min(D[np.ix_(S, S)].max() for S in itertools.combinations(range(n), n - f))
        kept, exact, lower = tightest(D, f)
        assert exact
        assert len(kept) == n - f
        assert D[np.ix_(kept, kept)].max() == pytest.approx(best)
        assert lower == pytest.approx(np.sqrt(best))


def test_mda_beyond_its_budget_says_so_and_bounds_the_optimum():
    D = np.square(messages(40, 3, 0)[:, None] - messages(40, 3, 0)[None]).sum(axis=2)
    optimum = tightest(D, 8)
    assert optimum[1]
    for budget in (1, 4, 16):
        kept, exact, lower = tightest(D, 8, budget=budget)
        assert len(kept) == 32
        diameter = np.sqrt(D[np.ix_(kept, kept)].max())
        assert lower <= optimum[2] + 1e-12 <= diameter + 2e-12
        assert exact == (lower == pytest.approx(diameter)) or diameter > lower
    assert not tightest(D, 8, budget=1)[1]


@pytest.mark.parametrize("seed", range(20))
def test_the_geometric_median_has_zero_subgradient(seed: int):
    rng = np.random.default_rng(seed)
    n, d = 3 + seed % 12, 1 + seed % 5
    X = rng.standard_normal((n, d))
    if seed % 3 == 0:
        X[-1] *= 1e30
    if seed % 4 == 0:
        X[0] = X[1]
    out = agg.geomed(f=1)(X)
    distance = np.linalg.norm(X - out.value, axis=1)
    far = distance > 1e-9
    pull = ((X[far] - out.value) / distance[far, None]).sum(axis=0)
    assert np.linalg.norm(pull) <= np.sum(~far) + 1e-6
    assert out.info.exact


def test_thousands_of_gram_matrices_per_second():
    """An attack search calls this with candidate after candidate; a bound that a slow machine keeps, too."""
    import time

    G = agg.gram(messages(30, 500, 0))
    for name in ("krum", "caf", "nnm+caf"):
        rule = agg.parse(name, f=3)
        begin = time.process_time()
        for _ in range(50):
            rule.weights_from_gram(G)
        assert (time.process_time() - begin) / 50 < 5e-3, name
