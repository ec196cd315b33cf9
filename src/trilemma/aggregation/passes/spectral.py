"""The covariance of weighted messages from their geometry alone, and the walk that CAF and Filter take.

For weights c with p = c / Σc, the weighted mean is μ = Σ p_i x_i and the covariance
Σ p_i (x_i − μ)(x_i − μ)ᵀ. Its non-zero eigenvalues are those of the n×n matrix √p_i ⟨x_i − μ, x_j − μ⟩ √p_j;
if u is the top eigenvector of that one, the projections on the top eigenvector v of the covariance are
⟨v, x_i − μ⟩ = Σ_j ⟨x_i − μ, x_j − μ⟩ √p_j u_j / √λ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy

from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.types import Array

ROUNDING = 1e-9
"""τ within this of the maximum is the maximum: equal rows leave together although their τ differ in a bit."""


@dataclass(frozen=True)
class Reweighting:
    """One step of the reweighting: the weights c, and the top eigenvalue of the weighted covariance."""

    c: Array
    variance: float


def top_eigenpair(M: Array) -> tuple[float, Array]:
    """Return the largest eigenvalue of a symmetric matrix and its unit eigenvector.

    >>> value, vector = top_eigenpair(np.array([[2.0, 0.0], [0.0, 1.0]]))
    >>> value, abs(vector).tolist()
    (2.0, [1.0, 0.0])
    """
    n = len(M)
    if n > 1:  # LAPACK's driver for a single eigenpair is the fastest by far
        values, vectors, found, _, status = scipy.linalg.lapack.dsyevr(M, range="I", il=n, iu=n)
        if status == 0 and found == 1:
            return float(values[0]), np.asarray(vectors[:, 0])
    values, vectors = np.linalg.eigh(M)
    return float(values[-1]), vectors[:, -1]


def reweightings(geometry: Geometry, above: float = 0.0) -> Iterator[Reweighting]:
    """Walk from the rows' weights, removing some along the direction of largest variance, till none varies.

    It ends where Σc is no longer more than `above`.

    τ_i = ⟨v, x_i − μ_c⟩², c_i ← c_i (1 − τ_i / max τ), the maximum over the rows that still have weight:
    over all rows, a row already removed could keep the maximum for ever.
    """
    G = geometry.inner[:-1, :-1]
    c = geometry.masses
    while True:
        active = np.flatnonzero(c)
        if not len(active) or c.sum() <= above:
            return
        weight = c[active]
        p = weight / weight.sum()
        inner = G[np.ix_(active, active)]
        to_mean = inner @ p
        H = inner - to_mean[:, None] - to_mean[None, :] + p @ to_mean
        root = np.sqrt(p)
        variance, u = top_eigenpair(root[:, None] * H * root[None, :])
        yield Reweighting(c, max(variance, 0.0))
        along = np.abs(H @ (root * u))
        if variance <= 0.0 or along.max() <= 0.0:
            return
        keep = 1.0 - np.square(along / along.max())
        keep[keep < ROUNDING] = 0.0
        c = c.copy()
        c[active] = weight * keep
