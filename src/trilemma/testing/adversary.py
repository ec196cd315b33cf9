"""A search for messages on which a rule errs most: what its κ is held against.

A rule of coefficient κ keeps ‖F(x) − x̄_S‖² ≤ κ · (λ_max or trace of Cov_S) for every S of n − f messages. The
search climbs at random towards the input of largest ratio; all S are looked at, so n is small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def subset_moments(X: Array, f: int) -> tuple[NDArray[np.intp], Array, Array, Array]:
    """Return every subset of n − f rows, with the mean, the trace and the top eigenvalue of its covariance.

    The covariance is Σ (x_i − x̄)(x_i − x̄)ᵀ / (n − f); its top eigenvalue comes from a singular value.
    """
    n, d = X.shape
    subsets = np.array(list(itertools.combinations(range(n), n - f)))
    rows = X[subsets]
    means = rows.mean(axis=1)
    centred = rows - means[:, None]
    traces = (centred**2).sum(axis=(1, 2)) / (n - f)
    tops = np.linalg.svd(centred, compute_uv=False)[:, 0] ** 2 / (n - f) if d else traces
    return subsets, means, traces, tops


def weighed_moments(X: Array, f: int, weights: Array) -> tuple[Array, Array, Array, Array]:
    """Return the same of every subset that weighs no less than all without the f heaviest, by weights."""
    n = len(X)
    subsets = (np.arange(1, 1 << n)[:, None] >> np.arange(n)) & 1
    heavy = subsets @ weights
    kept = heavy >= np.sort(weights)[: n - f].sum() * (1 - 1e-12)
    p = (subsets * weights / heavy[:, None])[kept]
    means = p @ X
    rows = np.sqrt(p)[:, :, None] * (X - means[:, None])
    covariance = np.swapaxes(rows, 1, 2) @ rows
    tops = np.linalg.eigvalsh(covariance)[:, -1] if X.shape[1] else np.zeros(len(p))
    return p, means, np.trace(covariance, axis1=1, axis2=2), tops


def robustness_ratio(
    value: Array, X: Array, f: int, *, spectral: bool, weights: Array | None = None
) -> float:
    """Return the smallest κ with ‖value − x̄_S‖² ≤ κ·(λ_max or trace of Cov_S) for every S of n − f rows.

    With weights: for every S that weighs no less than all without the f heaviest.
    """
    found = subset_moments(X, f) if weights is None else weighed_moments(X, f, weights)
    _, means, traces, tops = found
    variance = tops if spectral else traces
    error = ((means - value) ** 2).sum(axis=1)
    rounding = 1e-24 * (X**2).sum()  # what float64 cannot tell from zero is not held against the value
    return float(np.max(np.maximum(error - rounding, 0) / np.maximum(variance, 1e-300)))


def starting_points(rng: np.random.Generator, n: int, f: int, d: int) -> Iterator[Array]:
    """Yield inputs that hurt: noise, a tight and a far Byzantine cluster, equal Byzantine rows, a grid."""
    while True:
        yield rng.standard_normal((n, d))
        for tightness, distance in ((0.1, 2.0), (0.0, 5.0), (0.3, 1.0)):
            X = rng.standard_normal((n, d))
            X[n - f :] = tightness * X[n - f :] + distance * rng.standard_normal(d)
            yield X
        yield np.sign(rng.standard_normal((n, d))) * (rng.random((n, d)) < 0.4) + 1e-3 * rng.standard_normal(
            (n, d)
        )


def climb(
    value: Callable[[Array], Array],
    n: int,
    f: int,
    d: int,
    *,
    spectral: bool,
    starts: int,
    patience: int,
    weights: Array | None = None,
) -> tuple[float, Array]:
    """Return the largest ratio ‖F(X) − x̄_S‖² / variance of S, over all S, that a search finds, and its X."""
    rng = np.random.default_rng(1000 * n + 10 * f + d)
    best, worst = -1.0, np.zeros((n, d))
    for X in itertools.islice(starting_points(rng, n, f, d), starts):
        ratio = robustness_ratio(value(X), X, f, spectral=spectral, weights=weights)
        step, failures = float(X.std()), 0
        while failures < patience:
            touched = rng.random((n, d)) < rng.uniform(0.05, 0.6)
            Y = X + step * touched * rng.standard_normal((n, d))
            higher = robustness_ratio(value(Y), Y, f, spectral=spectral, weights=weights)
            if higher > ratio:
                X, ratio, failures = Y, higher, 0
            else:
                failures += 1
                step *= 0.93
        if ratio > best:
            best, worst = ratio, X
    return best, worst
