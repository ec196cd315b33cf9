"""How much liars can hide: the largest common shift that no test and no correction sees, with constants.

**A common shift.** f liars send messages with honest noise, and each adds the same shift of length s in every
one of t rounds. In units of their noise, their sums get a common part of length y = s√t/R, where
R² = σ_ind² + nσ_cor². With b = C√t/R the bound on the data, ρ the correlation of two clients' noise and χ the
largest length of noise that counts as honest, they hide

    from the test of lengths      while  d + y² ≤ (χ + b)²
    from the test of pairs        while  2(1+ρ)d + 4y² ≤ (√(2(1+ρ)) χ + 2b)²
    from the spectrum             while  y² f (1 − f/n) ≤ ℓ²,   (ℓ² + d)(ℓ² + n)/ℓ² = the edge,  ℓ² ≈ √(nd)

and the shift moves the mean of n clients by (f/n) s = √f ℓ R/(n√t). Beyond the last line a direction becomes
visible, whose overlap with the true one is c² = (1 − nd/ℓ⁴)/(1 + d/ℓ²). The model is set right along it, so
that 1 − c² of the shift stays. That is largest near ℓ = √d. So whatever s they choose, liars can do at most
about √(fd) R/(2n√t): half of what they could do with turned noise.

**Any messages**, turned noise included. Let x_i be the liars' sums in units of √K_ii. A pair's sum is at most
P = √(2(1+ρ)) χ + 2b long, a single one at least L = χ_low − b. So

    ‖Σ x_i‖² = Σ_{i<j} ‖x_i + x_j‖² − (f−2) Σ ‖x_i‖² ≤ f(f−1)/2 P² − f(f−2) L²,

and no f clients can move the mean by more than the root of this over n without a proof against one of them.
For large d this is √(fd) R/(n√t). Derivations: docs/frontier.md.

**On a graph**, where each client shares secrets with k others, K_ii = (σ_ind² + kσ_cor²)t, ρ = 0 for liars
who share no secret, and R² = σ_ind² + λσ_cor², λ the largest eigenvalue of the graph's Laplacian, at most 2k:
noise is nowhere stronger, so liars are seen at the latest where these formulas say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trilemma.base.errors import UserError
from trilemma.learning.defences.evidence.limits import edge, lengths
from trilemma.learning.defences.evidence.schedule import looks
from trilemma.privacy.threats.covariance import agreed_graph
from trilemma.privacy.types import SMALLEST, NoiseLaw


@dataclass(frozen=True)
class Hidden:
    """How much f liars can hide after t rounds.

    Attributes:
        length: The largest shift, per liar and round, that passes the test of lengths.
        pairs: The largest shift that passes the test of pairs.
        spectrum: The largest shift whose direction does not stand out.
        mean: How far the largest shift that passes all three moves the mean of all clients.
        left: The most that the correction leaves in the mean, over all shifts that pass lengths and pairs.
        most: The most that any messages of f clients can move the mean without failing lengths or pairs.
        seen_after: The round from which liars are visible who cancel contributions as long as the clip.
    """

    length: float
    pairs: float
    spectrum: float
    mean: float
    left: float
    most: float
    seen_after: float

    @property
    def shift(self) -> float:
        """The largest shift that passes all three tests."""
        return min(self.length, self.pairs, self.spectrum)


def hidden_shift(
    law: NoiseLaw,
    clip: float,
    clients: int,
    byzantine: int,
    dim: int,
    rounds: int,
    alarm: float = 1e-6,
    neighbours: int | None = None,
) -> Hidden:
    """Return how much liars can hide in `rounds` rounds of a run with false-alarm probability `alarm`.

    `neighbours` is with how many others each client shares secrets; None: with all.

    >>> found = hidden_shift(NoiseLaw(1.19, 0.64), 2.25, clients=100, byzantine=10, dim=1290, rounds=30)
    >>> round(found.shift, 2), round(found.mean, 3), round(found.left, 3), round(found.most, 2)
    (9.41, 0.941, 0.938, 3.77)
    """
    n, f, t = clients, byzantine, rounds
    _check(law, clip, n, f, dim, t, alarm, neighbours)
    own, spread, correlation = _noise(law, n, neighbours)
    bound, unit = clip * math.sqrt(t) / own, own / math.sqrt(t)
    low, high = lengths(dim, alarm / (4 * n * n * len(looks(t))))
    pair = 2 * (1 + correlation)
    alone = math.sqrt(max(0.0, (high + bound) ** 2 - dim))
    two = math.sqrt(max(0.0, (math.sqrt(pair) * high + 2 * bound) ** 2 - pair * dim)) / 2
    least = smallest_spike(n, dim)
    group = math.sqrt(least / (f * (1 - f / n))) * spread / own
    shift = min(alone, two, group) * unit
    across = n**2 / (f * (1 - f / n) * spread**2)
    along = n / max(law.sigma_ind**2, 1e-12 * spread**2)
    longest = min(alone, two) * math.sqrt(f * (1 - f / n)) * own / spread
    left = max(remaining(longest * share / 200, n, dim) for share in range(1, 201))
    return Hidden(
        alone * unit,
        two * unit,
        group * unit,
        f / n * shift,
        math.sqrt(f / (1 - f / n)) / n * left * spread / math.sqrt(t),
        together(f, math.sqrt(pair) * high + 2 * bound, high + bound, max(0.0, low - bound)) * unit / n,
        least / (clip**2 * along * across / (along + across)),
    )


def _check(
    law: NoiseLaw, clip: float, n: int, f: int, dim: int, t: int, alarm: float, neighbours: int | None
) -> None:
    """Refuse what the formulas are not made for."""
    if not (f > 0 and 2 * f < n and dim >= 1 and t >= 1):
        raise UserError(f"what liars hide needs 0 < f < n/2, d ≥ 1, T ≥ 1; got f = {f}, n = {n}, d = {dim}")
    if neighbours is not None and not 1 <= neighbours < n:
        raise UserError(
            f"k = {neighbours}: each of n = {n} clients has n − 1 others, and shares with at least one"
        )
    if not SMALLEST <= clip <= 1 / SMALLEST:
        raise UserError(f"clip = {clip:g}: allowed are {SMALLEST:g} to {1 / SMALLEST:g}")
    if not 0 < alarm < 1:
        raise UserError(f"alarm = {alarm:g}: a probability strictly between 0 and 1 is needed")
    if law.silent:
        raise UserError("without noise liars hide nothing from it: give sigma_ind, sigma_cor or a target ε")


def _noise(law: NoiseLaw, clients: int, neighbours: int | None) -> tuple[float, float, float]:
    """Return √K_ii, R and ρ for one round; on a graph R is the largest that a direction among clients has."""
    if neighbours is None or neighbours >= clients - 1:
        partners, most = clients - 1, float(clients)
    else:
        graph = agreed_graph(clients, neighbours)
        partners, most = int(graph.degrees[0]), float(graph.spectrum[-1])
    own = math.sqrt(law.sigma_ind**2 + partners * law.sigma_cor**2)
    spread = math.sqrt(law.sigma_ind**2 + most * law.sigma_cor**2)
    # Two liars who share no secret may agree more than two who do.
    return own, spread, -((law.sigma_cor / own) ** 2) if partners == clients - 1 else 0.0


def together(count: int, pair: float, high: float, low: float) -> float:
    """Return a bound on the length of the sum of `count` vectors.

    Each vector is `low` to `high` long, and the sum of any two at most `pair`.

    >>> together(1, 9.0, 2.0, 1.0), together(2, 3.0, 2.0, 1.0), together(3, 9.0, 2.0, 1.0)
    (2.0, 3.0, 6.0)
    """
    if count == 1:
        return high
    square = count * (count - 1) / 2 * pair**2 - count * (count - 2) * low**2
    return min(count * high, math.sqrt(square))


def remaining(spike: float, members: int, dim: int) -> float:
    """Return what the correction leaves of a shift that adds a spike of length ℓ = `spike` to white noise.

    >>> remaining(10.0, 100, 1290), round(remaining(36.0, 100, 1290), 1)
    (10.0, 19.3)
    """
    square = spike**2
    if square <= smallest_spike(members, dim):
        return spike
    return spike * (1 - (1 - members * dim / square**2) / (1 + dim / square))


def smallest_spike(members: int, dim: int) -> float:
    """Return ℓ² of the smallest rank-one addition to white noise (m, d) that stands above the edge.

    >>> round(smallest_spike(100, 1290) / math.sqrt(100 * 1290), 2)
    1.57
    """
    over = max(edge(members, dim) - dim - members, 2 * math.sqrt(members * dim))
    return (over + math.sqrt(over**2 - 4 * members * dim)) / 2
