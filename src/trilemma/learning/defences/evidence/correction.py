"""What is visible but proves nothing: the model is set right along directions that stand out of the noise.

**Directions.** Whitened by the known covariance, K^(-½) S is an m × d matrix of independent standard
Gaussians plus what the data and the liars added. The largest squared singular value of noise alone is about
(√d + √m)² (the edge). A singular value above the edge belongs to a direction in which the clients together
moved the model. The honest gradient is one; it stands out early because the members' mean has little noise.
Liars who push together add another, or bend that one.

**Correction.** In a single direction a robust mean costs very little. For every direction v above the edge,
the members' moves ⟨S_i, v⟩ are sorted, a quarter is dropped at either end (more, if more may lie), and the
model is moved along v to the mean of the rest. Before that, members who stand apart are left out of the move,
for as long as they stand apart. That leaves noise in the move that no longer cancels, but accuses nobody.
Liars can then move the model along v only by what hides within the honest spread, however long their
messages are. What they did before the direction became visible is taken back too, because sums are tested,
not single rounds. A direction found in noise is not exactly the true one, and what liars do across it stays:
`hidden` says how much.

**Limits.** If a quarter or more may lie, the middle of the moves is no longer clearly the honest clients'. It
is still better than a plain mean, but a robust rule does better, and its aggregate is then left alone.

**Shrinkage.** Projections on a direction found in the same data are too long by a known factor: √λ is shrunk
to √((λ−d−m)² − 4dm)/√λ, which is best in mean square (Gavish and Donoho, "Optimal shrinkage of singular
values", 2017). The edge with its fluctuation is Johnstone's ("On the distribution of the largest eigenvalue
in principal components analysis", 2001).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from trilemma.learning.steps.trace import Array, Law

QUARTILES = 2 * 0.6744897501960817
"""Distance between the quartiles of a Gaussian, in standard deviations."""

FALSELY = 0.2
"""The expected share of honest members among those left out because they stand apart, at most."""

SURE = 3.2724
"""The 0.999 quantile of the Tracy–Widom law of order 1."""


def edge(members: int, dim: int) -> float:
    """Return the 0.999 quantile of the top eigenvalue of the Gram matrix of white noise (members, dim).

    >>> round(edge(100, 1290), 1)
    2182.7
    """
    inner, outer = math.sqrt(max(dim - 1, 1)), math.sqrt(members)
    spread = (inner + outer) * math.cbrt(1 / inner + 1 / outer)
    return (inner + outer) ** 2 + SURE * spread


@dataclass(frozen=True)
class Direction:
    """A direction above the edge: the unit vector v = Sᵀ mix.

    `mix` is (m,); `along` = S v (m,) are the members' moves along it; `shrunk` is the factor by which moves
    along it are shrunk, because v was found in the same noise.
    """

    mix: Array
    along: Array
    shrunk: float


def visible(gram: Array, law: Law, most: int) -> list[Direction]:
    """Return the directions that stand out of the noise, at most `most`, the largest eigenvalue first.

    `gram` (m, m) is the Gram matrix of the sums; all m members must have sent something.
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
    # If least · I − white has a Cholesky factor, no eigenvalue is above `least`. This test takes a fifth of
    # the time of an eigendecomposition.
    below = -white.T
    below.flat[:: m + 1] += least
    if scipy.linalg.lapack.dpotrf(below, lower=1, overwrite_a=1)[1] == 0:
        return np.zeros(0), np.zeros((m, 0))
    values, vectors = scipy.linalg.eigh(white, subset_by_value=(least, np.inf), check_finite=False)
    return values, vectors


@dataclass(frozen=True)
class Correction:
    """How a move is set right: it becomes kept · move + Sᵀ mix, with `mix` (m,); `aside` are left out."""

    kept: float
    mix: Array
    aside: tuple[int, ...] = ()


def worth_correcting(members: int, liars: int, robust: bool) -> bool:
    """Tell whether correcting along a direction improves on the rule's aggregate.

    `members` were heard and `liars` of them may lie; `robust`: the rule is not the plain mean.

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
    """Return how the model's move is set right; if no direction is above the edge, it stays as it is.

    `gram` (m, m) is the Gram matrix of the members' sums, `moved` (m,) their inner products with the model's
    move; at most `liars` of them lie. `shares` (m,) scale up the sums of members that were not heard in every
    round; None: all 1. `parts` (m,) are the members' shares in the move; None: nobody is left out. `seen` are
    the visible directions of the members that sent something; None: they are computed.
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
    """Return the distances of moves (m,) from their median, and their standard deviation, at least 1.

    The standard deviation is that of a Gaussian with the same quartiles.

    >>> away, spread = from_the_middle(np.array([0.0, 1.0, 2.0, 3.0, 9.0]))
    >>> away.tolist(), round(spread, 2)
    ([2.0, 1.0, 0.0, 1.0, 7.0], 1.48)
    """
    low, middle, up = np.quantile(along, (0.25, 0.5, 0.75))
    return np.abs(along - middle), max(1.0, float(up - low) / QUARTILES)


def _apart(seen: Sequence[Direction], law: Law, most: int) -> NDArray[np.int64]:
    """Return the places of at most `most` members who stand apart along visible directions.

    Several members who stand slightly apart are stronger evidence than one. So the j members with the
    smallest tail probabilities are taken, for the largest j with p_(j) ≤ FALSELY · j/m (Benjamini and
    Hochberg 1995).
    """
    apart = np.zeros(len(law.deviation))
    for found in seen:
        away, spread = from_the_middle(found.along / law.deviation)
        apart = np.maximum(apart, away / spread)
    order = np.argsort(-apart)
    tails = 2 * len(seen) * scipy.special.ndtr(-apart[order])
    few = np.flatnonzero(tails <= FALSELY * np.arange(1, len(order) + 1) / len(order))
    return order[: min(most, int(few[-1]) + 1 if len(few) else 0)]
