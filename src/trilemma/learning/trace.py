"""How releases reach the model, and the law of what a client has moved it by.

Client i releases u_i(s) = a_i(s) + z_i(s) in round s: a contribution of norm at most C(s), and noise. Its
message is a fixed linear combination of its releases, x_i(t) = Σ_s p_is(t) u_i(s) (a momentum averages them),
and the server moves the model by step(t) × an aggregate of the messages. So

    S_i(t) = Σ_{r ≤ t} step(r) x_i(r) = Σ_s c_is u_i(s),      c_is = Σ_r step(r) p_is(r),

is how far client i alone would have moved it: what it did, and nothing else, is what it is judged by. The
coefficients c are public, hence the law of the noise in S: every coordinate is N(0, K) with

    K_ij = Σ_s c_is c_js (R_s² δ_ij − σ_cor²),      R_s² = σ_ind² + m_s σ_cor²,

m_s the members who share secrets in round s (`privacy.covariance` of the complete graph, summed over rounds),
and ‖Σ_s c_is a_i(s)‖ ≤ b_i = Σ_s |c_is| C(s).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Places = NDArray[np.int64]

FLOOR = 1e-6


@dataclass(frozen=True)
class Trace:
    """How what clients release reaches the model, by the round.

    A client's message is keeps × its last one + adds × its release; the model moves by step × the aggregate.

    Attributes:
        step: How far, and in which sense, an aggregate moves the model.
        keeps: What a message keeps of the client's last one.
        adds: What it takes of the fresh release.
        model: The part of the broadcast that is the model.
        around: Whether messages are the model plus the release, rather than the release alone.
        decay: Weight decay λ, which adds λθ to a contribution that is clipped without it.
    """

    step: Callable[[int], float]
    keeps: Callable[[int], float] = lambda _: 0.0
    adds: Callable[[int], float] = lambda _: 1.0
    model: str = "params"
    around: bool = False
    decay: float = 0.0

    def vectors(self, messages: Tensor, model: Tensor) -> Tensor:
        """Return the messages (k, d) without the model they may be based on."""
        return messages - model if self.around else messages

    def messages(self, vectors: Tensor, model: Tensor) -> Tensor:
        """Undo `vectors`."""
        return vectors + model if self.around else vectors


@dataclass(frozen=True)
class Law:
    """What is known of honest clients' sums: covariance K (n, n) of a coordinate's noise, bounds b (n,)."""

    covariance: Array
    bounds: Array
    dim: int

    @classmethod
    def of(cls, shared: Array, coefficients: Array, spreads: Array, clips: Array, dim: int) -> Law:
        """Return the law for σ_cor² (T,), coefficients c (n, T), R_s² (T,) and C(s) (T,).

        >>> Law.of(np.array([4.0]), np.ones((2, 1)), np.array([9.0]), np.ones(1), 3).covariance
        array([[ 5., -4.],
               [-4.,  5.]])
        """
        own = np.diag((coefficients**2) @ spreads)
        common = (coefficients * shared) @ coefficients.T
        return cls(own - common, np.abs(coefficients) @ clips, dim)

    @cached_property
    def heard(self) -> Places:
        """Who has sent something: only they have noise in their sums."""
        return np.flatnonzero(self.covariance.diagonal() > 0).astype(np.int64)

    @cached_property
    def deviation(self) -> Array:
        """The noise's standard deviation in every client's sum (n,)."""
        return np.asarray(np.sqrt(self.covariance.diagonal()))

    @cached_property
    def pairs(self) -> tuple[Array, Array]:
        """Deviations (n, n) of the sum and the difference of two clients' sums, both of unit noise."""
        correlation = self.covariance / np.outer(self.deviation, self.deviation)
        more, less = (np.sqrt(np.maximum(2 * (1 + sign * correlation), 0.0)) for sign in (1.0, -1.0))
        return more, less

    @cached_property
    def alike(self) -> tuple[float, float] | None:
        """The variance of everybody's noise and what it shares with another's, if all were heard alike."""
        m = len(self.covariance)
        own, shared = float(self.covariance[0, 0]), float(self.covariance[0, -1]) if m > 1 else 0.0
        same = shared + (own - shared) * np.eye(m)
        return (own, shared) if np.allclose(self.covariance, same, rtol=0, atol=1e-12 * own) else None

    @cached_property
    def whitening(self) -> Array:
        """K^(-½) of all clients, who have all sent something.

        Variances are at least `FLOOR` times the largest: pairwise noise alone leaves none in the mean. Where
        all were heard alike, K = aI − b11ᵀ, and nothing has to be decomposed.
        """
        m = len(self.covariance)
        if self.alike is not None:
            across, along = whitened(*self.alike, m)
            return np.asarray(across * np.eye(m) + (along - across) / m)
        values, vectors = np.linalg.eigh(self.covariance)
        return np.asarray((vectors / np.sqrt(np.maximum(values, FLOOR * values[-1]))) @ vectors.T)

    def select(self, rows: Places) -> Law:
        """Return the law of some of the clients."""
        if len(rows) == len(self.bounds):
            return self
        return Law(self.covariance[np.ix_(rows, rows)], self.bounds[rows], self.dim)


def whitened(own: float, shared: float, members: int) -> tuple[float, float]:
    """Return the eigenvalues of K^(-½), across the mean and along it, of members who were heard alike.

    >>> whitened(5.0, -1.0, 2)
    (0.4082482904638631, 0.5)
    """
    across, along = own - shared, own + (members - 1) * shared
    least = FLOOR * max(across, along)
    return max(across, least) ** -0.5, max(along, least) ** -0.5
