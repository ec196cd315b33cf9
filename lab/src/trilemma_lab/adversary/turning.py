"""Turned noise: vectors are mixed so that they keep all lengths and inner products but point in a direction.

Let rows have Gram matrix Γ and inner products b with a unit direction. They can be given inner products g
instead if Γ − g gᵀ, the Gram matrix of their parts orthogonal to the direction, is positive semidefinite,
that is if gᵀ Γ⁻¹ g ≤ 1. The orthogonal parts had the Gram matrix P = Γ − b bᵀ and are to have W = Γ − g gᵀ =
P + b bᵀ − g gᵀ. The matrix M mixes the rows accordingly:

    M P Mᵀ = W,    M = P^½ (I + u uᵀ − v vᵀ)^½ P^(-½),    u = P^(-½) b,  v = P^(-½) g.

Then (g − M b) times the direction is added. P is decomposed once for all g. The square root differs from I
only in the plane of u and v, where it is that of a 2 × 2 matrix: √T = (T + δI)/√(tr T + 2δ), δ = √det T. So a
hundred goals g cost only a few matrix products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trilemma_lab.adversary.changed import Places

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TurnedRows:
    """r rows to be turned: Gram matrix Γ = `inner` (r, r), inner products b = `before` (r,) with a direction.

    >>> rows = TurnedRows(np.eye(2), np.zeros(2))
    >>> places, mixes = rows.turned(np.array([[0.6, 0.0], [1.1, 0.0]]))
    >>> places.tolist(), mixes.round(3).tolist()
    ([0], [[[0.8, 0.0, 0.6], [0.0, 1.0, 0.0]]])
    >>> rows.turned(np.array([[1.1, 0.0]]), further=True)[1].round(3).tolist()
    [[[0.0, 0.0, 1.1], [0.0, 1.0, 0.0]]]
    """

    inner: Array
    before: Array

    def furthest(self, way: Array) -> float:
        """Return the largest s for which the rows can have the inner products mean(before) + s · way.

        >>> round(TurnedRows(np.eye(4), np.zeros(4)).furthest(np.ones(4)), 4)
        0.5
        """
        scale, start = np.abs(self.inner).max(), self.before.mean()
        if not scale > 0:
            return 0.0
        sides = np.stack([way, np.full(len(way), start)], 1)
        solved = self._solved(sides)
        square, mixed = way @ solved
        rest = start * float(solved[:, 1].sum()) - 1
        inside = mixed**2 - square * rest
        return max(0.0, float((math.sqrt(inside) - mixed) / square)) * (1 - 1e-6) if inside > 0 else 0.0

    def mixed(self, shifts: Array, noise: str) -> tuple[Places, Array]:
        """Return how the rows are mixed so that their inner products shift, in B ways, by `shifts` (B, r).

        With `noise` "protocol" the rows stay as they are and the direction is added. Otherwise they are
        turned, and `shifts` count from the mean of their inner products before. The result is as in `turned`.

        >>> TurnedRows(np.eye(2), np.zeros(2)).mixed(np.array([[0.6, 0.0]]), "protocol")[1].tolist()
        [[[1.0, 0.0, 0.6], [0.0, 1.0, 0.0]]]
        """
        if noise != "protocol":
            return self.turned(self.before.mean() + shifts, noise == "stretched")
        mixes = np.zeros((*shifts.shape, shifts.shape[1] + 1))
        mixes[:, :, :-1], mixes[:, :, -1] = np.eye(shifts.shape[1]), shifts
        return np.arange(len(shifts)), mixes

    def turned(self, goals: Array, further: bool = False) -> tuple[Places, Array]:
        """Turn the rows so that their inner products with the direction are `goals` (B, r).

        Returns the places of the goals that are possible, and for these the coefficients (B', r, r + 1) of
        the rows and of the direction. With `further` all goals are possible: rows are turned as far as
        possible and then stretched along the direction.
        """
        r = len(self.inner)
        if self._roots is None:
            return np.zeros(0, np.int64), np.zeros((0, r, r + 1))
        needed = np.einsum("bi,bi->b", goals @ self._inverse, goals)  # gᵀ Γ⁻¹ g
        places = np.arange(len(goals)) if further else np.flatnonzero(needed <= 1.0)
        root, inverse = self._roots
        wanted = goals
        if further:
            wanted = np.sqrt(np.minimum(1.0, (1 - 1e-12) / np.maximum(needed, 1e-300)))[:, None] * goals
        mixes = np.empty((len(places), r, r + 1))
        mixes[:, :, :-1] = _bent(inverse @ self.before, wanted[places] @ inverse, root, inverse)
        mixes[:, :, :-1] += np.eye(r)  # now M, with M P Mᵀ = W
        mixes[:, :, -1] = goals[places] - mixes[:, :, :-1] @ self.before
        return places, mixes

    def _solved(self, sides: Array) -> Array:
        """Return Γ⁻¹ times `sides` (r, q); the least squares' where rows are linearly dependent."""
        if self._roots is not None:
            return self._inverse @ sides
        scale = np.abs(self.inner).max()
        return np.asarray(np.linalg.lstsq(self.inner / scale, sides, rcond=None)[0] / scale, np.float64)

    @cached_property
    def _inverse(self) -> Array:
        """Γ⁻¹."""
        return np.asarray(np.linalg.inv(self.inner), np.float64)

    @cached_property
    def _roots(self) -> tuple[Array, Array] | None:
        """P^½ and P^(-½); None if P is singular: the rows' orthogonal parts are linearly dependent."""
        values, vectors = np.linalg.eigh(self.inner - np.outer(self.before, self.before))
        if not values[0] > 1e-9 * values[-1]:
            return None
        root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
        return root, inverse


def _bent(u: Array, v: Array, root: Array, inverse: Array) -> Array:
    """Return P^½ ((I + u uᵀ − v vᵀ)^½ − I) P^(-½) (B, r, r) for B vectors v (B, r)."""
    first = u / (np.linalg.norm(u) or 1.0)
    along = v @ first
    across = v - along[:, None] * first
    rest = np.linalg.norm(across, axis=1)
    second = across / np.where(rest > 0, rest, 1.0)[:, None]
    # In the plane of `first` and `second`: [[one, both], [both, two]] and its square root.
    one, both, two = 1 + u @ u - along**2, -along * rest, 1 - rest**2
    delta = np.sqrt(np.maximum(one * two - both**2, 0.0))
    scale = np.sqrt(one + two + 2 * delta)
    one, both, two = (one + delta) / scale - 1, both / scale, (two + delta) / scale - 1
    left, right = (first @ root, second @ root), (first @ inverse, second @ inverse)
    along_first = one[:, None] * right[0] + both[:, None] * right[1]
    along_second = both[:, None] * right[0] + two[:, None] * right[1]
    found: Array = left[0][:, None] * along_first[:, None, :] + left[1][:, :, None] * along_second[:, None, :]
    return found
