"""The geometric median argmin_m Σ_i ‖x_i − m‖, to machine precision.

The median lies in the affine hull of the n messages, so the search takes place in n coordinates obtained
from the inner products. Two facts end it in a few steps whatever the messages look like:

* a message x_k of multiplicity r is the median exactly if the unit vectors from it to the others sum to a
  vector of length ≤ r. If any message is, it is the one of least Σ_i ‖x_i − x_k‖: one check suffices;
* otherwise the objective is smooth near its minimum and Newton's method, kept on track by Weiszfeld's step
  m ← Σ (x_i/r_i) / Σ (1/r_i), r_i = ‖x_i − m‖, converges quadratically.

Steps are judged by the gradient, a sum of unit vectors, which no outlier can blow up.

Reference: Weiszfeld, "Sur le point pour lequel la somme des distances de n points donnés est minimum", 1937;
Chen, Su, Xu, "Distributed statistical machine learning in adversarial settings", 2017.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Geometric
from trilemma.aggregation.steps.types import Array, Weighing

TOLERANCE = 1e-12
"""Length of the gradient, per message, at which the search ends."""

STEPS = 500


@rules.register("geomed")
class GeometricMedian(Geometric):
    """The point of least total (weighted) distance to the messages, to machine precision.

    κ = 4(1 + f/(n−2f))² (Allouah et al., AISTATS 2023; trace criterion). Cost: two reads of X and some ten
    solves of n×n systems. Where the minimum is not unique (an even number of messages on a line) it is a
    message.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.geomed(f=1)(torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0 ** 0.5]])).value
    tensor([1.0000, 0.5774])
    """

    weighs: ClassVar[bool] = True

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return the weights of the median."""
        mass = geometry.masses
        Z = coordinates(geometry.inner[:-1, :-1])
        k = best_message(geometry)
        same = geometry.distances[k] <= 0.0
        away = Z - Z[k]
        distance = np.linalg.norm(away, axis=1)
        distance[same] = np.inf
        pull = (mass[:, None] * (away / distance[:, None])).sum(axis=0)
        force, held = float(np.linalg.norm(pull)), np.where(same, mass, 0.0)
        if force <= held.sum() * (1.0 + 1e-12):
            return Weighing(held / held.sum())
        # Leave the message downhill, to where Weiszfeld's step with that message held back would go.
        m = Z[k] + (1.0 - held.sum() / force) * pull / (mass / distance).sum()
        m, steps = _descend(Z, m, mass)
        weights = mass / np.maximum(np.linalg.norm(Z - m, axis=1), np.finfo(float).tiny)
        return Weighing(weights / weights.sum(), exact=steps < STEPS, iterations=steps)

    def kappa(self, n: int) -> float:
        """Return 4(1 + f/(n−2f))²."""
        self.check(n)
        f, total = self.counted(n)
        return 4 * (1 + f / (total - 2 * f)) ** 2


def coordinates(G: Array) -> Array:
    """Return n points in n dimensions with inner products G; a row's error is relative to its own length.

    >>> Z = coordinates(np.array([[4.0, 0.0], [0.0, 1e60]]))
    >>> np.allclose(Z @ Z.T, [[4.0, 0.0], [0.0, 1e60]])
    True
    """
    length = np.sqrt(G.diagonal())
    unit = np.where(length > 0.0, length, 1.0)
    values, vectors = np.linalg.eigh(G / unit[:, None] / unit[None, :])
    result: Array = length[:, None] * vectors * np.sqrt(np.maximum(values, 0.0))
    return result


def best_message(geometry: Geometry) -> int:
    """Return the message of least total distance to the others.

    Compared by ‖x_i − x_k‖ − ‖x_i − r‖, which stays accurate for x_i far away.
    """
    inner = geometry.inner[:-1, :-1]
    own = inner.diagonal()
    gain = own[None, :] - 2.0 * inner
    total = np.sqrt(geometry.distances) + np.sqrt(own)[:, None]
    nearer = np.divide(gain, total, out=np.zeros_like(gain), where=total > 0.0)
    return int(np.argmin((geometry.masses[:, None] * nearer).sum(axis=0)))


def _gradient(Z: Array, m: Array, mass: Array) -> tuple[Array, Array, Array]:
    """Return distances, unit vectors from the messages, and their weighted sum."""
    away = m - Z
    distance = np.maximum(np.linalg.norm(away, axis=1), np.finfo(float).tiny)
    unit = away / distance[:, None]
    return distance, unit, (mass[:, None] * unit).sum(axis=0)


def _descend(Z: Array, m: Array, mass: Array) -> tuple[Array, int]:
    """Alternate Weiszfeld and Newton steps until the gradient vanishes."""
    distance, unit, gradient = _gradient(Z, m, mass)
    for step in range(STEPS):
        size = float(np.linalg.norm(gradient))
        if size <= TOLERANCE * mass.sum():
            return m, step
        inverse = mass / distance
        hessian = inverse.sum() * np.eye(Z.shape[1]) - (unit * inverse[:, None]).T @ unit
        scale = inverse.sum()
        newton = np.linalg.solve(hessian / scale + 1e-14 * np.eye(len(hessian)), gradient / scale)
        for candidate in (m - newton, m - gradient / scale):
            trial = _gradient(Z, candidate, mass)
            if np.linalg.norm(trial[2]) < size:
                break
        # The second candidate is Weiszfeld's step: it lowers the objective even where the gradient grows.
        if np.array_equal(candidate, m):
            return m, step
        m, (distance, unit, gradient) = candidate, trial
    return m, STEPS
