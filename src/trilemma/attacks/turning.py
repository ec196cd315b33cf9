"""Noise that is turned: vectors that keep all lengths and inner products among them, and point somewhere.

Rows of Gram matrix Γ may have any inner products g with a direction of length 1 for which Γ − g gᵀ, what is
left of them across it, is a Gram matrix: gᵀ Γ⁻¹ g ≤ 1. With b these inner products before, P = Γ − b bᵀ is
what was left and W = Γ − g gᵀ = P + b bᵀ − g gᵀ what is to be left; M takes one to the other and mixes the
rows,

    M P Mᵀ = W,    M = P^½ (I + u uᵀ − v vᵀ)^½ P^(-½),    u = P^(-½) b,  v = P^(-½) g,

and as much of the direction is added as then lacks in g, which is g − M b. P is decomposed once. The root
differs from I in the plane of u and v only, where it is one of two rows and columns: √T = (T + δI)/√(tr T +
2δ), δ = √det T. So a hundred goals are a few products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trilemma.attacks.changed import Places

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """r rows as they are turned: their Gram matrix `inner` Γ, their inner products `before` with a direction.

    >>> rows = Rows(np.eye(2), np.zeros(2))
    >>> places, mixes = rows.turned(np.array([[0.6, 0.0], [1.1, 0.0]]))
    >>> places.tolist(), mixes.round(3).tolist()
    ([0], [[[0.8, 0.0, 0.6], [0.0, 1.0, 0.0]]])
    >>> rows.turned(np.array([[1.1, 0.0]]), further=True)[1].round(3).tolist()
    [[[0.0, 0.0, 1.1], [0.0, 1.0, 0.0]]]
    """

    inner: Array
    before: Array

    def furthest(self, way: Array) -> float:
        """Return the largest s for which they can have the inner products mean(before) + s · way.

        >>> round(Rows(np.eye(4), np.zeros(4)).furthest(np.ones(4)), 4)
        0.5
        """
        scale, start = np.abs(self.inner).max(), self.before.mean()
        if not scale > 0:
            return 0.0
        sides = np.stack([way, np.full(len(way), start)], 1)
        solved = np.linalg.lstsq(self.inner / scale, sides, rcond=None)[0]
        square, mixed = way @ solved / scale
        rest = start * float(solved[:, 1].sum()) / scale - 1
        inside = mixed**2 - square * rest
        return max(0.0, float((math.sqrt(inside) - mixed) / square)) * (1 - 1e-6) if inside > 0 else 0.0

    def mixed(self, shifts: Array, noise: str) -> tuple[Places, Array]:
        """Return how they are mixed for their inner products to shift in B ways (B, r).

        By `noise` (the attack's option) rows stay as they are and the direction is added, or they are turned:
        all of them then shift from the mean of their inner products before. Returns what `turned` does.

        >>> Rows(np.eye(2), np.zeros(2)).mixed(np.array([[0.6, 0.0]]), "protocol")[1].tolist()
        [[[1.0, 0.0, 0.6], [0.0, 1.0, 0.0]]]
        """
        if noise != "protocol":
            return self.turned(self.before.mean() + shifts, noise == "stretched")
        mixes = np.zeros((*shifts.shape, shifts.shape[1] + 1))
        mixes[:, :, :-1], mixes[:, :, -1] = np.eye(shifts.shape[1]), shifts
        return np.arange(len(shifts)), mixes

    def turned(self, goals: Array, further: bool = False) -> tuple[Places, Array]:
        """Turn them for inner products `goals` (B, r) with the direction.

        Returns which of the B are possible, as places, and for these the mixes (B', r, r + 1) of the rows and
        the direction. With `further` all are: rows that cannot turn as far are turned as far as they can, and
        stretched along the direction.
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
        mixes[:, :, :-1] += np.eye(r)  # M present Mᵀ = wanted
        mixes[:, :, -1] = goals[places] - mixes[:, :, :-1] @ self.before
        return places, mixes

    @cached_property
    def _inverse(self) -> Array:
        """Γ⁻¹."""
        return np.asarray(np.linalg.inv(self.inner), np.float64)

    @cached_property
    def _roots(self) -> tuple[Array, Array] | None:
        """P^½ and P^(-½); None where rows have no part of their own across the direction."""
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
