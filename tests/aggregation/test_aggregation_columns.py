"""The pass of coordinate-wise rules: sorting networks, windows, shares, ties, and mixing in cache."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from trilemma import aggregation as agg
from trilemma.aggregation.passes.columns import Mixture, Window, network, plain_window_means, window_means


@pytest.mark.parametrize("n", range(1, 13))
def test_networks_put_the_needed_ranks_in_place(n: int):
    """The 0-1 principle: a network that is right on all inputs of zeros and ones is right on all inputs."""
    inputs = np.array(list(itertools.product([0, 1], repeat=n))).T
    for window in [*(Window(n - 2 * t) for t in range((n + 1) // 2)), Window(n, around_median=True)]:
        rows = [row.copy() for row in inputs]
        for i, j in network(n, window):
            rows[i], rows[j] = np.minimum(rows[i], rows[j]), np.maximum(rows[i], rows[j])
        trim = (n - window.size) // 2
        for rank in range(n) if window.around_median else range(max(trim - 1, 0), min(n - trim + 1, n)):
            np.testing.assert_array_equal(rows[rank], np.sort(inputs, axis=0)[rank])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("n", "window"),
    [
        (1, Window(1)),
        (2, Window(2)),
        (7, Window(1)),
        (8, Window(2)),
        (30, Window(24)),
        (30, Window(27, around_median=True)),
        (9, Window(1, around_median=True)),
        (9, Window(9, around_median=True)),
        (12, Window(5, around_median=True)),
    ],
    ids=str,
)
def test_kernel_equals_plain_operations(n: int, window: Window, ties: bool, dtype: torch.dtype):
    X = torch.randn(n, 33_000 // n + 17_000, generator=torch.Generator().manual_seed(n))
    X = (X.mul(2).round() if ties else X).to(dtype)
    rows = np.arange(n)
    fast, plain = window_means(X, rows, window), plain_window_means(X, rows, window)
    assert fast.value.dtype == dtype
    torch.testing.assert_close(fast.value, plain.value, rtol=2 * torch.finfo(dtype).eps, atol=1e-15)
    np.testing.assert_allclose(fast.shares, plain.shares, rtol=1e-5)
    np.testing.assert_allclose(fast.squares, plain.squares, rtol=1e-5)
    assert fast.shares.sum() == pytest.approx(X.shape[1])


def test_kernel_on_some_of_the_rows():
    X = torch.randn(10, 20_000, generator=torch.Generator().manual_seed(0))
    X[3] = torch.nan
    rows = np.array([0, 1, 2, 4, 5, 6, 7, 8, 9])
    fast = window_means(X, rows, Window(1))
    assert torch.equal(fast.value, X[rows].median(0).values)


@pytest.mark.parametrize("stochastic", [True, False])
def test_mixing_in_cache(stochastic: bool):
    """A X, then the window; with a common offset that float32 sums of rows would not survive."""
    n, d = 11, 20_000
    X = torch.randn(n, d, generator=torch.Generator().manual_seed(1)) + (1e5 if stochastic else 0.0)
    rng = np.random.default_rng(2)
    A = rng.random((6, n))
    A /= A.sum(axis=1, keepdims=True) if stochastic else 10.0
    mixture = Mixture(A, 4 if stochastic else None)
    fast = window_means(X, np.arange(n), Window(2), mixture)
    exact = (torch.from_numpy(A) @ X.double()).sort(0).values[2:4].mean(0)
    ulp = torch.finfo(torch.float32).eps * exact.abs()
    assert ((fast.value.double() - exact).abs() <= 0.51 * ulp + 2e-6).all()
    squares = (X.double() - exact).square().sum(1)
    np.testing.assert_allclose(fast.squares, squares, rtol=1e-5)


def test_zeros_are_shared_by_all_who_hold_them():
    """Sparse gradients: most values of a coordinate are exactly zero."""
    X = torch.zeros(6, 40_000)
    X[0] = 1.0
    out = agg.cwmed(f=1)(X)
    assert torch.equal(out.value, torch.zeros(40_000))
    np.testing.assert_allclose(out.weights, [0, 0.2, 0.2, 0.2, 0.2, 0.2], atol=1e-6)
    small = agg.cwmed(f=1)(X[:, :5])
    np.testing.assert_allclose(small.weights, out.weights, atol=1e-6)


def test_chains_find_overflowing_differences():
    """Two honest rows of opposite sign near the end of float32: their difference is not a float32."""
    X = torch.randn(9, 5000, generator=torch.Generator().manual_seed(3))
    X[0], X[1] = 3.3e38, -3.3e38
    out = agg.parse("nnm+cwmed", f=2)(X)
    assert torch.isfinite(out.value).all()
    assert out.value.abs().max() < 10
