"""How releases move the model, and the probability law of a client's sum.

Client i releases u_i(s) = a_i(s) + z_i(s) in round s: a contribution of norm at most C(s), plus noise. Its
message is a fixed linear combination of its releases, x_i(t) = Σ_s p_is(t) u_i(s) (momentum averages them),
and the server moves the model by step(t) × an aggregate of the messages. The sum of client i,

    S_i(t) = Σ_{r ≤ t} step(r) x_i(r) = Σ_s c_is u_i(s),      c_is = Σ_r step(r) p_is(r),

is how far it alone would have moved the model so far. A client is judged by its sum, which depends on nothing
but its own releases. The coefficients c are public, so the law of the noise in S is known: each coordinate is
N(0, K) with

    K_ij = Σ_s c_is c_js (R_s² δ_ij − σ_cor²),      R_s² = σ_ind² + m_s σ_cor²,

where m_s members share secrets in round s, everybody with everybody. If each has some neighbours only, it is

    K = Σ_s c_s c_sᵀ ∘ (σ_ind² I + σ_cor² L_s),

L_s the Laplacian of the graph of round s (`privacy.covariance`, added up over rounds).
The contributions are bounded by ‖Σ_s c_is a_i(s)‖ ≤ b_i = Σ_s |c_is| C(s).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trilemma.privacy.threats.covariance import agreed_graph

Array = NDArray[np.float64]
Places = NDArray[np.int64]

FLOOR = 1e-6


@dataclass(frozen=True)
class Trace:
    """How releases move the model, as functions of the round t.

    A message is keeps(t) × the client's last message + adds(t) × its release of round t. The model moves by
    step(t) × the aggregate of the messages.

    Attributes:
        step: The factor of the aggregate, with its sign: −γ for descent with learning rate γ.
        keeps: The coefficient of the client's last message.
        adds: The coefficient of the new release.
        model: The name of the part of the broadcast that is the model.
        around: Whether a message is the model plus the release, rather than the release alone.
        decay: Weight decay λ: it adds λθ to a contribution after clipping.
    """

    step: Callable[[int], float]
    keeps: Callable[[int], float] = lambda _: 0.0
    adds: Callable[[int], float] = lambda _: 1.0
    model: str = "params"
    around: bool = False
    decay: float = 0.0

    def vectors(self, messages: Tensor, model: Tensor) -> Tensor:
        """Return the messages (k, d), less the model if they contain it (`around`)."""
        return messages - model if self.around else messages

    def messages(self, vectors: Tensor, model: Tensor) -> Tensor:
        """Undo `vectors`."""
        return vectors + model if self.around else vectors


@dataclass(frozen=True)
class Law:
    """The law of honest clients' sums: noise covariance K (n, n) per coordinate, bounds b (n,) on the data.

    `alike` is (variance, covariance of any two clients) if all clients were heard in the same rounds, so that
    K has one value on its diagonal and one beside it. Otherwise it is None.
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

    @classmethod
    def on_graphs(
        cls,
        own: Array,
        shared: Array,
        sharing: NDArray[np.bool_],
        neighbours: int,
        coefficients: Array,
        clips: Array,
        dim: int,
    ) -> Law:
        """Return the law for σ_ind² (T,) and σ_cor² (T,) where each client has so many `neighbours`.

        `sharing` (n, T) are the clients that shared secrets in each round. They agree on a graph
        (`privacy.covariance.agreed_graph`), the same in all rounds in which they are the same.

        >>> everybody, once = np.ones((3, 1), bool), np.ones((3, 1))
        >>> Law.on_graphs(np.ones(1), np.array([4.0]), everybody, 2, once, np.ones(1), 3).covariance
        array([[ 9., -4., -4.],
               [-4.,  9., -4.],
               [-4., -4.,  9.]])
        """
        covariance = np.diag(coefficients**2 @ own)
        told = np.flatnonzero(coefficients.any(axis=0))  # with little momentum a few rounds are all there is
        changed = (sharing[:, told[1:]] != sharing[:, told[:-1]]).any(axis=0)
        for rounds in np.split(told, np.flatnonzero(changed) + 1) if len(told) else ():
            members = np.flatnonzero(sharing[:, rounds[0]])
            some = coefficients[np.ix_(members, rounds)]
            laplacian = agreed_graph(len(members), neighbours).laplacian
            covariance[np.ix_(members, members)] += laplacian * ((some * shared[rounds]) @ some.T)
        return cls(covariance, np.abs(coefficients) @ clips, dim)

    @cached_property
    def participating(self) -> Places:
        """The clients that have sent anything: those whose sums contain noise."""
        return np.flatnonzero(self.covariance.diagonal() > 0).astype(np.int64)

    @cached_property
    def deviation(self) -> Array:
        """The standard deviation √K_ii of the noise in every client's sum (n,)."""
        return np.asarray(np.sqrt(self.covariance.diagonal()))

    @cached_property
    def pairs(self) -> tuple[Array, Array]:
        """Standard deviations (n, n) of S_i/√K_ii + S_j/√K_jj and of S_i/√K_ii − S_j/√K_jj."""
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
        """K^(-½) (n, n); all n clients must have sent something.

        Eigenvalues of K are raised to at least `FLOOR` times the largest: with pairwise noise alone the mean
        has no noise and K is singular. If all clients were heard alike, K = aI − b11ᵀ needs no decomposition.
        """
        m = len(self.covariance)
        if self.alike is not None:
            across, along = whitened(*self.alike, m)
            return np.asarray(across * np.eye(m) + (along - across) / m)
        values, vectors = np.linalg.eigh(self.covariance)
        return np.asarray((vectors / np.sqrt(np.maximum(values, FLOOR * values[-1]))) @ vectors.T)

    def white(self, gram: Array) -> Array:
        """Return K^(-½) `gram` K^(-½), the Gram matrix of whitened sums; without matrix products if `alike`.

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
        """Return the law of the clients in `rows`."""
        if np.array_equal(rows, np.arange(len(self.bounds))):
            return self
        some = self.covariance[np.ix_(rows, rows)]
        return Law(some, self.bounds[rows], self.dim, self.alike or _shape(some))


def whitened(own: float, shared: float, members: int) -> tuple[float, float]:
    """Return the eigenvalues of K^(-½) for m members heard alike: orthogonal to the vector 1, and along it.

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
    """Return (diagonal, off-diagonal) of a matrix that has one value on and one off its diagonal; else None.

    >>> _shape(np.array([[5.0, -4.0], [-4.0, 5.0]])), _shape(np.diag([1.0, 2.0]))
    ((5.0, -4.0), None)
    """
    if len(covariance) < 2:
        return None
    own, shared = float(covariance[0, 0]), float(covariance[0, -1])
    apart = np.abs(covariance - _alike(len(covariance), own, shared)).max()
    return (own, shared) if apart <= 1e-12 * own else None
