"""From a secret-sharing graph to noise multipliers: a threat model is a covariance.

Client i sends x_i + v̄_i + Σ_j v_ij over its neighbours j in the secret-sharing graph, with v_ij = −v_ji of
variance σ_cor² and v̄_i of variance σ_ind². Split the clients in three:

* senders S: honest, and the adversary sees their messages,
* known K: their secrets are in the adversary's hands, which subtracts every v_ij with j ∈ K,
* hidden: everyone else; v_ij with a hidden j appears in one seen message only, so it is independent noise.

What is left on the senders' messages is N(0, Σ) with

    Σ = σ_cor² L_S + diag(σ_ind² + σ_cor² · #hidden neighbours of i),        L_S the Laplacian within S.

Replacing client i's data moves coordinate i alone, by Δ, so i's protection is that of a Gaussian mechanism
of noise multiplier z_i = 1 / (Δ √(Σ⁻¹)_ii): (Σ⁻¹)_ii is one over the variance of i's noise given all the
others'.

Colluders are known; Byzantine clients that do not collude are hidden. So is a client that dropped out:
secrets shared with it stay uncancelled, which adds noise to its neighbours. Streams are fresh every round,
so only who sent in this very round matters. A dropout helps privacy (the adversary sees one message less),
but only the server says who dropped out, and the server is the adversary: certificates should count
everyone as a sender. A late message makes its author a sender of the round it belongs to; a seed disclosed
to repair a dropout makes its owner known.

For the complete graph over n clients, f Byzantine, q of them colluding, this is Lemma A.4 of Allouah,
Guerraoui, Stephan (ICML 2025):

    (Σ⁻¹)_ii = 1 / ((n−q)σ_cor² + σ_ind²) · [1 + σ_cor² / ((f−q)σ_cor² + σ_ind²)].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from trilemma.base.errors import PrivacyError, UserError
from trilemma.base.keys import Key
from trilemma.privacy.types import NoiseLaw

Matrix = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SecretGraph:
    """Who shares secrets with whom: a symmetric 0/1 matrix without self-loops.

    >>> SecretGraph.complete(4).degrees.tolist(), SecretGraph.ring(6, 2).degrees.tolist()
    ([3, 3, 3, 3], [2, 2, 2, 2, 2, 2])
    """

    adjacency: NDArray[np.bool_]

    def __post_init__(self) -> None:
        a = self.adjacency
        if a.ndim != 2 or a.shape[0] != a.shape[1] or not np.array_equal(a, a.T) or a.diagonal().any():
            raise UserError(
                "a secret-sharing graph is a symmetric square 0/1 matrix with zeros on its diagonal"
            )

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.adjacency)

    @cached_property
    def degrees(self) -> NDArray[np.int64]:
        """With how many others each client shares a secret."""
        return np.asarray(self.adjacency.sum(axis=1))

    def neighbours(self, client: int) -> tuple[int, ...]:
        """Return the clients that share a secret with `client`."""
        return tuple(int(j) for j in np.flatnonzero(self.adjacency[client]))

    @property
    def laplacian(self) -> Matrix:
        """Degrees on the diagonal, −1 for every pair that shares a secret."""
        return np.asarray(np.diag(self.degrees).astype(float) - self.adjacency)

    @cached_property
    def spectrum(self) -> Matrix:
        """The eigenvalues of the Laplacian in rising order; the first is 0."""
        return np.asarray(np.linalg.eigvalsh(self.laplacian))

    @cached_property
    def connectivity(self) -> float:
        """Algebraic connectivity: the second smallest eigenvalue of the Laplacian."""
        return max(0.0, float(self.spectrum[1])) if self.clients > 1 else 0.0

    @classmethod
    def complete(cls, clients: int) -> SecretGraph:
        """Return the graph where every pair shares a secret."""
        return cls(~np.eye(clients, dtype=bool))

    @classmethod
    def ring(cls, clients: int, degree: int) -> SecretGraph:
        """Return the graph where each client shares secrets with its `degree` nearest on a ring (even)."""
        _regular(clients, degree)
        if degree % 2:
            raise UserError(f"on a ring the degree is even (as many on each side), got {degree}")
        ids = np.arange(clients)
        distance = np.abs(ids[:, None] - ids[None, :])
        distance = np.minimum(distance, clients - distance)
        return cls((distance > 0) & (distance <= degree // 2))

    @classmethod
    def regular(cls, clients: int, degree: int, key: Key) -> SecretGraph:
        """Return a random graph where every client has `degree` neighbours.

        A circulant graph is shuffled by 20 switches per edge, each replacing edges ab, cd by ac, bd. Random
        regular graphs mix well: their connectivity is near degree − 2√(degree − 1), that of rings near zero.

        >>> SecretGraph.regular(30, 6, Key(1)).connectivity > 3 * SecretGraph.ring(30, 6).connectivity
        True
        """
        _regular(clients, degree)
        a = cls.ring(clients, degree - degree % 2).adjacency.copy()
        if degree % 2:
            half = np.arange(clients)
            a[half, (half + clients // 2) % clients] = True
        # Python's own lists and sets: a thousand clients have hundreds of thousands of switches.
        edges = [(int(i), int(j)) for i, j in np.argwhere(np.triu(a))]
        joined = [set(np.flatnonzero(row).tolist()) for row in a]
        rng, switches = key.numpy(), 20 * len(edges)
        drawn = rng.integers(max(len(edges), 1), size=(switches, 2)).tolist()
        turned = rng.integers(2, size=switches).tolist()
        for (first, second), turn in zip(drawn, turned, strict=True):
            (i, j), (k, m) = edges[first], edges[second][:: 1 - 2 * turn]
            if len({i, j, k, m}) == 4 and k not in joined[i] and m not in joined[j]:
                for one, other, new in ((i, j, k), (j, i, m), (k, m, i), (m, k, j)):
                    joined[one].remove(other)
                    joined[one].add(new)
                edges[first], edges[second] = (i, k), (j, m)
        a = np.zeros((clients, clients), bool)
        for place, others in enumerate(joined):
            a[place, list(others)] = True
        return cls(a)


@lru_cache(maxsize=64)
def agreed_graph(clients: int, neighbours: int | None) -> SecretGraph:
    """Return the graph that `clients` clients use who were told to have `neighbours` partners each.

    Nobody draws it: whoever knows the two numbers knows the graph, and what is certified on it holds whoever
    the liars are, also if they choose their places. None: everybody shares secrets with everybody, and so
    they do where there are no more partners than that. Where n · k is odd each has one more.

    >>> agreed_graph(9, 3).degrees.tolist(), agreed_graph(4, 8).degrees.tolist()
    ([4, 4, 4, 4, 4, 4, 4, 4, 4], [3, 3, 3, 3])
    """
    if neighbours is None or neighbours >= clients - 1:
        return SecretGraph.complete(clients)
    return SecretGraph.regular(clients, neighbours + clients * neighbours % 2, Key(0).fold("secret graph"))


def partners(client: int, members: Sequence[int], neighbours: int | None) -> tuple[int, ...]:
    """Return the members that `client`, one of them, shares secrets with.

    >>> partners(30, (10, 20, 30, 40), None), len(partners(3, range(50), 8))
    ((10, 20, 40), 8)
    """
    places = sorted(members)
    found = agreed_graph(len(places), neighbours).neighbours(places.index(client))
    return tuple(places[place] for place in found)


def _regular(clients: int, degree: int) -> None:
    if not 0 <= degree < clients:
        raise UserError(f"each client has 0 ≤ degree < n = {clients} neighbours, got degree = {degree}")
    if clients * degree % 2:
        raise UserError(f"no graph gives n = {clients} clients {degree} neighbours each: n × degree is odd")


def covariance(
    graph: SecretGraph, law: NoiseLaw, senders: Iterable[int], known: Iterable[int] = ()
) -> Matrix:
    """Return Σ of the noise left on the messages of `senders`, in increasing order of their ids.

    >>> covariance(SecretGraph.complete(3), NoiseLaw(sigma_ind=1, sigma_cor=2), senders=[0, 1], known=[])
    array([[ 9., -4.],
           [-4.,  9.]])
    """
    seen, lost = sorted(set(senders)), sorted(set(known))
    if set(seen) & set(lost):
        raise UserError(f"clients {sorted(set(seen) & set(lost))} cannot be honest senders and known at once")
    for client in (*seen, *lost):
        if not 0 <= client < graph.clients:
            raise UserError(f"client {client} is not one of the {graph.clients} in the secret-sharing graph")
    if not seen:
        raise UserError("a covariance needs at least one sender")
    unknown_degree = graph.degrees[seen] - graph.adjacency[np.ix_(seen, lost)].sum(axis=1)
    within = graph.adjacency[np.ix_(seen, seen)]
    diagonal = np.diag(law.sigma_ind**2 + law.sigma_cor**2 * unknown_degree)
    return np.asarray(diagonal - law.sigma_cor**2 * within, dtype=float)


def multipliers(
    graph: SecretGraph,
    law: NoiseLaw,
    sensitivity: float,
    byzantine: Iterable[int] = (),
    colluding: Iterable[int] = (),
    dropped: Iterable[int] = (),
) -> dict[int, float]:
    """Return the noise multiplier z_i of every honest client that sent a message, for named clients.

    `colluding` is a subset of `byzantine`. `dropped` are honest clients whose message the server never got.

    >>> z = multipliers(SecretGraph.complete(3), NoiseLaw(sigma_cor=2), 2.0, byzantine=[2])
    >>> {client: round(value, 4) for client, value in z.items()}
    {0: 1.2247, 1: 1.2247}
    """
    bad, known, gone = frozenset(byzantine), frozenset(colluding), frozenset(dropped)
    if not known <= bad:
        raise UserError(f"colluders are Byzantine clients; {sorted(known - bad)} are not among them")
    senders = sorted(set(range(graph.clients)) - bad - gone)
    if law.silent:
        return dict.fromkeys(senders, 0.0)
    sigma = covariance(graph, law, senders, known)
    try:
        factor = np.linalg.cholesky(sigma)
    except np.linalg.LinAlgError:
        factor = None
    # Eigenvalues below rounding error mean that some combination of the messages carries no noise at all.
    if factor is None or np.linalg.eigvalsh(sigma)[0] <= 1e-12 * np.trace(sigma):
        raise PrivacyError(
            "no guarantee: some combination of the honest messages carries no noise, because the pairwise "
            "noise cancels in it. Use sigma_ind > 0, or fewer colluders"
        )
    inverse_factor = np.linalg.solve(factor, np.eye(len(senders)))
    precision = (inverse_factor**2).sum(axis=0)
    return {i: 1 / (sensitivity * math.sqrt(p)) for i, p in zip(senders, precision, strict=True)}


def complete_multiplier(
    law: NoiseLaw, sensitivity: float, clients: int, byzantine: int, collusion: int
) -> float:
    """Return z of every honest client in the complete graph: Lemma A.4 in closed form.

    By symmetry it does not matter who colludes.

    >>> round(complete_multiplier(NoiseLaw(sigma_cor=0.6), 4.5, clients=100, byzantine=10, collusion=0), 6)
    1.271283
    """
    return _lemma(law, sensitivity, clients - collusion, byzantine - collusion, clients - collusion)


def worst_multiplier(graph: SecretGraph, law: NoiseLaw, sensitivity: float, collusion: int) -> float:
    """Return a proven lower bound on z whoever lies and however many: only `collusion` clients leak secrets.

    The worst case is that every liar colludes and everybody else is an honest sender. Compare what the
    adversary sees of one client j: nothing, if it is hidden; x_j + v̄_j + Σ_k v_jk, if it is a sender; all
    v_jk, if it is known. Each can be computed from the next (add x_j + v̄_j, forget), and seeing more never
    raises the variance of i's noise given what is seen. So turning hidden liars into senders, and senders
    into colluders as long as there are fewer than q, only raises (Σ⁻¹)_ii: the worst real number of liars is
    q.

    On the complete graph this is `complete_multiplier` with f = q, which for q = 0 says
    (Σ⁻¹)_ii = 1/(nσ_ind²) + (1 − 1/n)/(nσ_cor² + σ_ind²).

    >>> worst_multiplier(SecretGraph.complete(9), NoiseLaw(sigma_cor=1.0), 2.0, collusion=0)
    Traceback (most recent call last):
    trilemma.base.errors.PrivacyError: no guarantee against any 0 colluders: with sigma_ind = 0 ...
    """
    return bound_multiplier(graph, law, sensitivity, collusion, collusion)


def weighed_multiplier(
    law: NoiseLaw, sensitivity: float, scales: Sequence[float], gone: int, own: float = 0.0
) -> float:
    """Return z of a client of scale `own`, or the least of all, where noise cancels in a weighted sum.

    Client i, of scale ω_i, sends x_i + v̄_i + Σ_j v_ij/ω_i: in Σ ω_i x_i what pairs share cancels. Multiplied
    by ω_i, which is public, messages are those of an ordinary federation whose clients have clips and
    noise of their own, Σ' = σ_cor² L + diag(ω_i² σ_ind²), and z_i = 1/(Δ ω_i √(Σ'⁻¹)_ii). On the complete
    graph of the N = n − `gone` clients that are there and do not collude, with d_j = Nσ_cor² + ω_j² σ_ind²,

        (Σ'⁻¹)_ii = 1/d_i + σ_cor²/d_i² / Σ_j (ω_j² σ_ind² / (N d_j))               (Sherman, Morrison 1950).

    It grows when the sum loses its largest terms: the worst that are `gone` are the heaviest of the others.
    Fewer of them only help, as in `worst_multiplier`, and so does a hidden client in the place of a sender.

    >>> law = NoiseLaw(0.5, 1.0)
    >>> equal = complete_multiplier(law, 2.0, 9, 2, 2)
    >>> abs(weighed_multiplier(law, 2.0, [1.0] * 9, gone=2) - equal) < 1e-12
    True
    """
    if own == 0.0:
        return min(weighed_multiplier(law, sensitivity, scales, gone, one) for one in set(scales))
    if law.silent:
        return 0.0
    others = sorted(scales)
    others.remove(own)
    squares = np.square([own, *others[: len(others) - gone]]) * law.sigma_ind**2
    shared = len(squares) * law.sigma_cor**2
    spread = squares + shared
    left = float((squares / spread).sum()) / len(squares)
    if not left > 0:
        raise PrivacyError(
            "no guarantee: with sigma_ind = 0 the pairwise noise cancels in the weighted sum of the "
            "messages. Use sigma_ind > 0"
        )
    precision = (1 + law.sigma_cor**2 / (spread[0] * left)) / spread[0]
    return 1 / (sensitivity * own * math.sqrt(precision))


def mean_noise(
    law: NoiseLaw,
    clients: int,
    byzantine: int,
    neighbours: int | None = None,
    scales: Sequence[float] = (),
) -> float:
    """Return the variance of the noise in a coordinate of the honest mean: (fσ_cor² + σ_ind²)/(n − f).

    With k `neighbours` it is at most (fkσ_cor²/(n − f) + σ_ind²)/(n − f): a liar leaves k streams behind.
    With `scales` the mean is weighted, and the heaviest lie: (f(n − f)σ_cor² + Σω²σ_ind²)/(Σω)².

    >>> round(mean_noise(NoiseLaw(sigma_cor=0.6), clients=100, byzantine=10), 4)
    0.04
    """
    if scales:
        honest = np.sort(scales)[: clients - byzantine]
        own = float((honest**2).sum()) * law.sigma_ind**2
        return (byzantine * len(honest) * law.sigma_cor**2 + own) / float(honest.sum()) ** 2
    left = left_by_liars(clients, byzantine, neighbours)
    return (left * law.sigma_cor**2 + law.sigma_ind**2) / (clients - byzantine)


def left_by_liars(clients: int, byzantine: int, neighbours: int | None = None) -> float:
    """Return how many streams of pairs are left in the sum of the honest messages, per honest client.

    >>> left_by_liars(100, 10), left_by_liars(100, 10, neighbours=9)
    (10.0, 1.0)
    """
    honest = clients - byzantine
    degree = int(agreed_graph(clients, neighbours).degrees.max()) if neighbours is not None else honest
    return byzantine * min(degree, honest) / honest


def bound_multiplier(
    graph: SecretGraph, law: NoiseLaw, sensitivity: float, byzantine: int, collusion: int
) -> float:
    """Return a proven lower bound on z (hence upper bound on ε) whoever the Byzantine and the colluders are.

    Take N = n − q clients left after removing any q colluders, λ' the connectivity of their graph and h = f
    − q hidden ones. On vectors supported on the senders xᵀLx ≥ λ'(‖x‖² − (Σx)²/N), so Σ ⪰ (σ_cor²λ' +
    σ_ind²) I − (σ_cor²λ'/N) 11ᵀ, whose inverse has the closed form of Lemma A.4 with the connectivity in
    place of N. Removing a vertex lowers the connectivity by at most one (Fiedler 1973), so λ' ≥ λ_2 − q. On
    the complete graph λ_2 = n and the bound is exact.

    When that is worthless, a client still has r ≥ degree − q neighbours whose secrets are unknown; forgetting
    all other edges only lowers Σ, and leaves a star: variance σ_ind² + r σ_cor²σ_ind²/(σ_cor² + σ_ind²) given
    the other messages. The better of the two is returned.

    >>> law = NoiseLaw(sigma_ind=0.1, sigma_cor=1.0)
    >>> exact = complete_multiplier(law, 2.0, 12, 3, 2)
    >>> abs(bound_multiplier(SecretGraph.complete(12), law, 2.0, 3, 2) - exact) < 1e-12
    True
    """
    return _bound(Tightness.of(graph), law, sensitivity, byzantine, collusion)


@dataclass(frozen=True)
class Tightness:
    """What a bound needs to know of a graph of so many `clients`."""

    clients: int
    connectivity: float
    least_degree: int

    @classmethod
    def of(cls, graph: SecretGraph) -> Tightness:
        """Measure a graph."""
        return cls(graph.clients, graph.connectivity, int(graph.degrees.min()))


@cache  # three numbers a graph: graphs of many sizes need not be kept for them
def _agreed_tightness(clients: int, neighbours: int) -> Tightness:
    return Tightness.of(agreed_graph(clients, neighbours))


def agreed_multiplier(
    law: NoiseLaw, sensitivity: float, clients: range, neighbours: int, byzantine: int, collusion: int
) -> float:
    """Return `bound_multiplier` on the worst of the agreed graphs of as many members as `clients` says.

    Every number of members has a graph of its own, and a larger one may be connected less well.

    >>> law = NoiseLaw(sigma_ind=0.1, sigma_cor=1.0)
    >>> some, more = (agreed_multiplier(law, 1.0, range(23, n), 5, 0, 0) for n in (24, 25))
    >>> more < some
    True
    """
    sizes = (_agreed_tightness(members, neighbours) for members in clients)
    return min(_bound(tight, law, sensitivity, byzantine, collusion) for tight in sizes)


def _bound(tight: Tightness, law: NoiseLaw, sensitivity: float, byzantine: int, collusion: int) -> float:
    if not 0 <= collusion <= byzantine < tight.clients:
        raise UserError(f"0 ≤ q ≤ f < n is needed, got q = {collusion}, f = {byzantine}, n = {tight.clients}")
    if law.silent:
        return 0.0
    left = tight.clients - collusion
    spectral = _lemma_variance(law, max(0.0, tight.connectivity - collusion), byzantine - collusion, left)
    free = max(0, tight.least_degree - collusion)
    ind, cor = law.sigma_ind**2, law.sigma_cor**2
    star = ind + free * cor * ind / (cor + ind)
    if max(spectral, star) <= 0:
        raise PrivacyError(
            f"no guarantee against any {collusion} colluders: with sigma_ind = 0 the noise cancels where "
            f"nobody is hidden, or they may cut the graph (connectivity {tight.connectivity:.3g}). "
            "Use sigma_ind > 0, more neighbours, or name the colluders"
        )
    return math.sqrt(max(spectral, star)) / sensitivity


def _lemma(law: NoiseLaw, sensitivity: float, connectivity: float, hidden: int, left: int) -> float:
    if law.silent:
        return 0.0
    variance = _lemma_variance(law, connectivity, hidden, left)
    if variance <= 0:
        raise PrivacyError(
            "no guarantee: with sigma_ind = 0 the pairwise noise cancels in the sum of the honest messages, "
            "when nobody lies or every liar colludes. Use sigma_ind > 0; for a paper's figure, which counts "
            "on liars that exist and keep their secrets, assume = 'published'"
        )
    return math.sqrt(variance) / sensitivity


def _lemma_variance(law: NoiseLaw, connectivity: float, hidden: int, left: int) -> float:
    """Return 1/(Σ⁻¹)_ii for Σ = (λσ_cor² + σ_ind²) I − (λσ_cor²/N) 11ᵀ on N − h senders."""
    ind, cor = law.sigma_ind**2, law.sigma_cor**2 * connectivity
    shared = cor / left
    grounded = ind + shared * hidden
    return (cor + ind) * grounded / (grounded + shared) if grounded > 0 else 0.0
