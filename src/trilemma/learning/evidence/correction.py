"""What cannot be proved but can be seen: the model, set right along directions that stand out of the noise.

Whitened by its known covariance, K^(-½) S is an m × d matrix of independent standard Gaussians plus what the
data and the liars added. Noise alone has a largest squared singular value of (√d + √m)² and a little (the
edge); what stands above it is a direction in which clients as a whole moved the model. The honest gradient
is one, and stands out early because the members' mean carries little noise; liars who push together are
another, or bend that one. In a single direction a robust mean costs next to nothing: for every direction v
above the edge, the members' moves ⟨S_i, v⟩ are sorted, a quarter dropped at either end (more, if more may
lie), and the model is put where the mean of the middle is. Whoever stands apart is first left out of the move
altogether, for as long as it does: that costs noise that no longer cancels, and no accusation. Liars then
move it along v by what hides within the honest spread, however long their messages are; what they did before
the direction could be seen is taken back as well, because sums are looked at, not rounds. A direction found
in noise is not the true one, and what they do across it stays: `hidden` says how much.

Where a quarter or more may lie, the middle is the liars' as much as the others'. It is better than a plain
mean all the same, but a robust rule knows better, and what it says is left alone there.

Projections on a direction that was found in the same data are too long by a known factor; √λ is shrunk to
√((λ−d−m)² − 4dm)/√λ, which is best in mean square (Gavish and Donoho, "Optimal shrinkage of singular values",
2017). The edge with its fluctuation is Johnstone's ("On the distribution of the largest eigenvalue in
principal components analysis", 2001).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from trilemma.learning.trace import Array, Law

QUARTILES = 2 * 0.6744897501960817
"""Distance of a Gaussian's quartiles, in standard deviations."""

FALSELY = 0.2
"""Of those who are left out because they stand apart, so many may be honest ones, on average."""

SURE = 3.2724
"""The 0.999 quantile of the Tracy–Widom law of order 1."""


def edge(members: int, dim: int) -> float:
    """Return what the top eigenvalue of the Gram matrix of white noise exceeds once in a thousand rounds.

    >>> round(edge(100, 1290), 1)
    2182.7
    """
    inner, outer = math.sqrt(max(dim - 1, 1)), math.sqrt(members)
    spread = (inner + outer) * math.cbrt(1 / inner + 1 / outer)
    return (inner + outer) ** 2 + SURE * spread


@dataclass(frozen=True)
class Direction:
    """A direction above the edge: S ᵀ `mix` is of length 1, `along` (m,) are the members' moves along it.

    `shrunk` is the share of a move along it that is not the noise it was found in.
    """

    mix: Array
    along: Array
    shrunk: float


def visible(gram: Array, law: Law, most: int) -> list[Direction]:
    """Return the directions that stand out of the noise, at most `most`, the clearest first.

    `gram` (m, m) is of the sums of members who have all sent something.
    """
    m, d = len(gram), law.dim
    top, x = above(law.white(gram), edge(m, d))
    found = []
    for k in range(len(top) - 1, max(len(top) - 1 - most, -1), -1):
        mix = law.whitening @ x[:, k] / math.sqrt(top[k])
        shrunk = math.sqrt(max((top[k] - d - m) ** 2 - 4 * d * m, 0.0)) / top[k]
        found.append(Direction(mix, gram @ mix, shrunk))
    return found


def above(white: Array, least: float) -> tuple[Array, Array]:
    """Return the eigenvalues (k,) above `least` in rising order, and their eigenvectors (m, k)."""
    m = len(white)
    # Where the edge less the matrix has a Cholesky factor, nothing is above it: a fifth of a decomposition.
    below = -white.T
    below.flat[:: m + 1] += least
    if scipy.linalg.lapack.dpotrf(below, lower=1, overwrite_a=1)[1] == 0:
        return np.zeros(0), np.zeros((m, 0))
    values, vectors = scipy.linalg.eigh(white, subset_by_value=(least, np.inf), check_finite=False)
    return values, vectors


@dataclass(frozen=True)
class Correction:
    """What becomes of the model's move: `kept` of it, plus y @ S, y = `mix` (m,); `aside` are left out."""

    kept: float
    mix: Array
    aside: tuple[int, ...] = ()


def worth_correcting(members: int, liars: int, robust: bool) -> bool:
    """Tell whether the middle of the moves of members who were heard is better than what a rule says.

    >>> worth_correcting(100, 20, robust=True), worth_correcting(30, 10, robust=True)
    (True, False)
    >>> worth_correcting(30, 10, robust=False), worth_correcting(30, 0, robust=False)
    (True, False)
    """
    return 0 < (4 if robust else 2) * liars < members


def correct(
    gram: Array,
    moved: Array,
    law: Law,
    liars: int,
    shares: Array | None = None,
    parts: Array | None = None,
    seen: Sequence[Direction] | None = None,
) -> Correction:
    """Return how the model's move is set right.

    `gram` (m, m) is of the members' sums and `moved` (m,) their inner products with the model's move; at
    most `liars` of them lie. `shares` (m,) scale the sums of members that were not always heard to a whole
    run's. `parts` (m,) are the members' shares in the move; without them nobody is left out of it. `seen` is
    `visible` of those who sent something, where that is known. Without a direction above the edge nothing is
    done.
    """
    heard = law.heard
    kept, mix = 1.0, np.zeros(len(gram))
    aside: list[int] = []
    if len(heard) < 2 * liars + 1 or not liars:
        return Correction(kept, mix)
    whole = np.ones(len(gram)) if shares is None else shares
    if seen is None:
        seen = visible(gram[np.ix_(heard, heard)], law.select(heard), liars + 1)
    while seen and parts is not None and len(aside) < liars:
        apart = _apart(seen, law.select(heard), liars - len(aside))
        if not len(apart):
            break
        aside += heard[apart].tolist()
        heard = np.delete(heard, apart)
        seen = visible(gram[np.ix_(heard, heard)], law.select(heard), liars - len(aside) + 1)
    if aside and parts is not None:
        kept = 1 / max(1 - float(parts[aside].sum()), 1e-9)
        mix[aside] = -kept * parts[aside]
        moved = kept * moved + gram @ mix
    m = len(heard)
    trimmed = min(max(liars - len(aside), m // 4), (m - 1) // 2)
    for found in seen:
        middle = np.sort(found.along * whole[heard])[trimmed : m - trimmed].mean()
        gap = middle - float(moved[heard] @ found.mix)
        mix[heard] += found.shrunk * gap * found.mix
    return Correction(kept, mix, tuple(sorted(aside)))


def from_the_middle(along: Array) -> tuple[Array, float]:
    """Return how far moves (m,) are from their median, and the spread of their middle half, at least 1.

    >>> away, spread = from_the_middle(np.array([0.0, 1.0, 2.0, 3.0, 9.0]))
    >>> away.tolist(), round(spread, 2)
    ([2.0, 1.0, 0.0, 1.0, 7.0], 1.48)
    """
    low, middle, up = np.quantile(along, (0.25, 0.5, 0.75))
    return np.abs(along - middle), max(1.0, float(up - low) / QUARTILES)


def _apart(seen: Sequence[Direction], law: Law, most: int) -> NDArray[np.int64]:
    """Return the members who stand apart along visible directions, at most `most`, as places.

    Many who stand a little apart say more than one: of m members the j with the smallest tail probabilities
    are taken, j the largest number with p_(j) ≤ FALSELY · j/m (Benjamini and Hochberg 1995).
    """
    apart = np.zeros(len(law.deviation))
    for found in seen:
        away, spread = from_the_middle(found.along / law.deviation)
        apart = np.maximum(apart, away / spread)
    order = np.argsort(-apart)
    tails = 2 * len(seen) * scipy.special.ndtr(-apart[order])
    few = np.flatnonzero(tails <= FALSELY * np.arange(1, len(order) + 1) / len(order))
    return order[: min(most, int(few[-1]) + 1 if len(few) else 0)]
