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

import math
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
    """What is known of honest clients' sums: covariance K (n, n) of a coordinate's noise, bounds b (n,).

    `alike` is the variance of everybody and the covariance of any two, where all have been heard alike.
    """

    covariance: Array
    bounds: Array
    dim: int
    alike: tuple[float, float] | None = None

    @classmethod
    def of(cls, shared: Array, coefficients: Array, spreads: Array, clips: Array, dim: int) -> Law:
        """Return the law for σ_cor² (T,), coefficients c (n, T), R_s² (T,) and C(s) (T,).

        >>> Law.of(np.array([4.0]), np.ones((2, 1)), np.array([9.0]), np.ones(1), 3).covariance
        array([[ 5., -4.],
               [-4.,  5.]])
        """
        n, first = len(coefficients), coefficients[:1]
        if n and (coefficients == first).all():  # all were heard alike
            own, common = float(first[0] ** 2 @ spreads), float(first[0] * shared @ first[0])
            alike, bound = (own - common, -common), float(np.abs(first[0]) @ clips)
            return cls(_alike(n, *alike), np.full(n, bound), dim, alike)
        covariance = np.diag((coefficients**2) @ spreads) - (coefficients * shared) @ coefficients.T
        return cls(covariance, np.abs(coefficients) @ clips, dim)

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
        if self.alike is not None:
            m, (own, shared) = len(self.covariance), self.alike
            both = (math.sqrt(max(2 * (1 + sign * shared / own), 0.0)) for sign in (1.0, -1.0))
            more, less = (_alike(m, there, scale) for there, scale in zip((2.0, 0.0), both, strict=True))
            return more, less
        correlation = self.covariance / np.outer(self.deviation, self.deviation)
        more, less = (np.sqrt(np.maximum(2 * (1 + sign * correlation), 0.0)) for sign in (1.0, -1.0))
        return more, less

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

    def white(self, gram: Array) -> Array:
        """Return K^(-½) `gram` K^(-½), the Gram matrix of white sums; no matrix product if all are alike.

        >>> law = Law(_alike(2, 5.0, -4.0), np.ones(2), 3, (5.0, -4.0))
        >>> np.allclose(law.white(law.covariance), np.eye(2))
        True
        """
        if self.alike is None:
            return np.asarray(self.whitening @ gram @ self.whitening)
        m = len(gram)
        across, along = whitened(*self.alike, m)
        more = (along - across) / m
        left = across * gram + more * gram.sum(axis=0)
        return np.asarray(across * left + more * left.sum(axis=1)[:, None])

    def select(self, rows: Places) -> Law:
        """Return the law of some of the clients."""
        if len(rows) == len(self.bounds):
            return self
        some = self.covariance[np.ix_(rows, rows)]
        return Law(some, self.bounds[rows], self.dim, self.alike or _shape(some))


def whitened(own: float, shared: float, members: int) -> tuple[float, float]:
    """Return the eigenvalues of K^(-½), across the mean and along it, of members who were heard alike.

    >>> whitened(3.0, -1.0, 3)
    (0.5, 1.0)
    """
    across, along = own - shared, own + (members - 1) * shared
    least = FLOOR * max(across, along)
    return max(across, least) ** -0.5, max(along, least) ** -0.5


def _alike(members: int, own: float, shared: float) -> Array:
    """Return the (m, m) matrix of `own` on the diagonal and `shared` beside it."""
    found = np.full((members, members), shared)
    np.fill_diagonal(found, own)
    return found


def _shape(covariance: Array) -> tuple[float, float] | None:
    """Return what is on the diagonal of a matrix and what beside it, where that is all there is to it.

    >>> _shape(np.array([[5.0, -4.0], [-4.0, 5.0]])), _shape(np.diag([1.0, 2.0]))
    ((5.0, -4.0), None)
    """
    if len(covariance) < 2:
        return None
    own, shared = float(covariance[0, 0]), float(covariance[0, -1])
    apart = np.abs(covariance - _alike(len(covariance), own, shared)).max()
    return (own, shared) if apart <= 1e-12 * own else None
