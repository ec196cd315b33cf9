"""What cannot be proved but can be seen: the model, set right along directions that stand out of the noise.

Whitened by its known covariance, K^(-½) S is an m × d matrix of independent standard Gaussians plus what the
data and the liars added. Noise alone has a largest squared singular value of (√d + √m)² and a little (the
edge); what stands above it is a direction in which clients as a whole moved the model. The honest gradient
is one, and stands out early because the members' mean carries little noise; liars who push together are
another, or bend that one. In a single direction a robust mean costs next to nothing: for every direction v
above the edge, the members' moves ⟨S_i, v⟩ are sorted, a quarter dropped at either end (more, if more may
lie), and the model is put where the mean of the middle is. Liars then move it along v by what hides within
the honest spread, however long their messages are; what they did before the direction could be seen is taken
back as well, because sums are looked at, not rounds. A direction found in noise is not the true one, and what
they do across it stays: `hidden` says how much.

Projections on a direction that was found in the same data are too long by a known factor; √λ is shrunk to
√((λ−d−m)² − 4dm)/√λ, which is best in mean square (Gavish and Donoho, "Optimal shrinkage of singular values",
2017). The edge with its fluctuation is Johnstone's ("On the distribution of the largest eigenvalue in
principal components analysis", 2001).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trilemma.learning.trace import Array, Law

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
    m, d, whiten = len(gram), law.dim, law.whitening
    top, x = np.linalg.eigh(whiten @ gram @ whiten)
    found = []
    for k in range(m - 1, max(m - 1 - most, -1), -1):
        if top[k] <= edge(m, d):
            break
        mix = whiten @ x[:, k] / math.sqrt(top[k])
        shrunk = math.sqrt(max((top[k] - d - m) ** 2 - 4 * d * m, 0.0)) / top[k]
        found.append(Direction(mix, gram @ mix, shrunk))
    return found


def correct(gram: Array, moved: Array, law: Law, liars: int, shares: Array | None = None) -> Array:
    """Return coefficients y (m,): the model is to be moved by y @ S beside what it was moved.

    `gram` (m, m) is of the members' sums and `moved` (m,) their inner products with the model's move; at
    most `liars` of them lie. `shares` (m,) scale the sums of members that were not always heard to a whole
    run's. Without a direction above the edge nothing is done.
    """
    heard = np.flatnonzero(law.covariance.diagonal() > 0)
    m = len(heard)
    answer = np.zeros(len(gram))
    if m < 2 * liars + 1 or not liars:
        return answer
    trimmed = min(max(liars, m // 4), (m - 1) // 2)
    whole = np.ones(m) if shares is None else shares[heard]
    for found in visible(gram[np.ix_(heard, heard)], law.select(heard), liars + 1):
        middle = np.sort(found.along * whole)[trimmed : m - trimmed].mean()
        gap = middle - float(moved[heard] @ found.mix)
        answer[heard] += found.shrunk * gap * found.mix
    return answer
