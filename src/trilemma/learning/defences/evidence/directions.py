"""Directions that stand out of the noise, for many Gram matrices at once.

**Directions.** Whitened by the known covariance, K^(-½) S is an m × d matrix of independent standard
Gaussians plus what the data and the liars added. The largest squared singular value of noise alone is about
(√d + √m)² (the edge). A singular value above the edge belongs to a direction in which the clients together
moved the model. The honest gradient is one; it stands out early because the members' mean has little noise.
Liars who push together add another, or bend that one.

**Shrinkage.** Projections on a direction found in the same data are too long by a known factor: √λ is shrunk
to √((λ−d−m)² − 4dm)/√λ, which is best in mean square (Gavish and Donoho, "Optimal shrinkage of singular
values", 2017). The edge with its fluctuation is Johnstone's ("On the distribution of the largest eigenvalue
in principal components analysis", 2001).

A server looks at one Gram matrix, on its host. Liars who foresee what it does with hundreds of lies look at
as many (…, m, m), on the device where these lie. A mask (B, m) says which members are counted, instead of
taking rows out, because they may differ between the B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy
import torch
from torch import Tensor

from trilemma.aggregation.passes.many import any_above, plain_top_eigenpairs, top_eigenpairs
from trilemma.base.recordings import filled_up
from trilemma.learning.defences.evidence.limits import LookLimits
from trilemma.learning.steps.trace import Array

QUARTILES = 2 * 0.6744897501960817
"""Distance between the quartiles of a Gaussian, in standard deviations."""


@dataclass(frozen=True)
class BoundedGrams:
    """Fixed numbers of steps, for loops that must not wait for what a device computes.

    `directions` is how many directions are searched for, `left_out` how many times clients are left out. Each
    loop appends to `going_on` a mask (B,): where it would have needed more steps.
    """

    directions: int
    left_out: int
    going_on: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Directions:
    """Directions above the edge, at most q for each of B Gram matrices, the largest eigenvalue first.

    A direction is the unit vector v = Sᵀ mix; `along` = S v are the members' moves along it. Both are
    (B, q, m), zero for members that are not counted. `shrunk` (B, q) is the factor by which moves along v are
    shrunk, because it was found in the same noise. At places without a direction, `shrunk` is zero and
    `there` (B, q) is False.
    """

    mix: Tensor
    along: Tensor
    shrunk: Tensor
    there: Tensor

    @classmethod
    def none(cls, count: int, members: int) -> Directions:
        """Return none for each of `count` matrices."""
        nothing = torch.zeros(count, 0, dtype=torch.float64)
        rows = nothing[..., None].expand(-1, -1, members)
        return cls(rows, rows, nothing, nothing > 0)

    def __len__(self) -> int:
        """How many there are at most for one matrix, q."""
        return self.there.shape[1]

    def only(self, some: Tensor | slice) -> Directions:
        """Return the directions of some of the B."""
        return Directions(*(part[some] for part in self.parts))

    def replaced(self, where: Tensor, by: Directions) -> Directions:
        """Return these directions, replaced by others at the places `where` of the B."""
        q = max(self.there.shape[1], by.there.shape[1])

        def put(mine: Tensor, new: Tensor) -> Tensor:
            return _filled(mine, q).index_copy(0, where, _filled(new, q))

        return Directions(*(put(mine, new) for mine, new in zip(self.parts, by.parts, strict=True)))

    def where(self, some: Tensor, by: Directions) -> Directions:
        """Return these directions, replaced by others, at most as many, where `some` (B,) is true."""

        def put(mine: Tensor, new: Tensor) -> Tensor:
            where = some.view(-1, *(1 for _ in mine.shape[1:]))
            return torch.where(where, _filled(new, mine.shape[1]), mine)

        return Directions(*(put(mine, new) for mine, new in zip(self.parts, by.parts, strict=True)))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All fields, in order."""
        return self.mix, self.along, self.shrunk, self.there


def _filled(part: Tensor, q: int) -> Tensor:
    """Return a field of `Directions` (B, …) padded with zeros to q directions."""
    missing = q - part.shape[1]
    return torch.cat([part, part.new_zeros(len(part), missing, *part.shape[2:])], 1) if missing else part


def visible(
    grams: Tensor, looks: Sequence[LookLimits], bounded: BoundedGrams | None = None
) -> list[Directions]:
    """Return, for each of L looks, the directions that stand out in its Gram matrices (L, B, m, m)."""
    (count, m), facts = grams.shape[1:3], looks[0].facts
    white = torch.stack([look.white(some) for look, some in zip(looks, grams, strict=True)])
    whiten = torch.stack([look.whitening for look in looks])[:, None].expand_as(grams)
    edges = torch.stack([look.sizes[m, 0] for look in looks])[:, None].expand(-1, count).flatten()
    most = edges.new_full(edges.shape, facts.liars + 1)
    grams, white, whiten = (part.flatten(0, 1) for part in (grams, white, whiten))
    found = among(grams, white, whiten, edges, facts.dim, most, facts.liars + 1, bounded)
    if bounded is not None:
        bounded.going_on.append(bounded.going_on.pop().view(-1, count).any(0))
    return [found.only(slice(count * place, count * (place + 1))) for place in range(len(looks))]


def among(
    grams: Tensor,
    white: Tensor,
    whiten: Tensor,
    edges: Tensor,
    dim: int,
    most: Tensor,
    limit: int,
    bounded: BoundedGrams | None,
) -> Directions:
    """Return the directions that stand out, the largest eigenvalue first; at most `most` (B,) and `limit`.

    `whiten` (B, m, m) is zero in rows and columns of members that are not counted; `white` is whiten @ grams
    @ whiten.
    """
    values, vectors = _above(white, edges, limit, bounded)
    first = torch.arange(values.shape[1], device=grams.device)
    there = (values > edges[:, None]) & (first < most[:, None])
    counted = whiten.diagonal(dim1=1, dim2=2) > 0
    top, size = torch.where(there, values, 1.0), counted.sum(1, keepdim=True)
    mix = (vectors @ whiten) * (there / top.sqrt())[..., None]
    shrunk = ((top - dim - size) ** 2 - 4 * dim * size).clamp(min=0.0).sqrt() / top * there
    return Directions(mix, mix @ grams * counted[:, None], shrunk, there)


def from_the_middle(along: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return distances (B, q, m) from the median of counted members, and their spread (B, q, 1), at least 1.

    Quantiles are interpolated linearly, as numpy does. A spread is a standard deviation, that of a
    Gaussian with the same quartiles.
    """
    rising, quarters = ranked(along, counted), 0.25 * torch.arange(1, 4, device=along.device)
    if counted is None:
        m = along.shape[2]
        at = [(m - 1) * part for part in (0.25, 0.5, 0.75)]
        part = ((m - 1) * quarters.to(along)).frac()
        lower = torch.stack([rising[..., int(place)] for place in at], -1)
        upper = torch.stack([rising[..., min(int(place) + 1, m - 1)] for place in at], -1)
    else:
        last = counted.sum(1)[:, None, None] - 1
        goal = last * quarters.to(along)
        start, part = goal.long().expand(-1, along.shape[1], -1), goal.frac()
        lower, upper = rising.gather(2, start), rising.gather(2, torch.minimum(start + 1, last))
    low, middle, high = (lower + part * (upper - lower)).unbind(2)
    return (along - middle[..., None]).abs(), ((high - low) / QUARTILES).clamp(min=1.0)[..., None]


def ranked(along: Tensor, counted: Tensor | None) -> Tensor:
    """Return moves (B, q, m) in rising order, those of members that are not counted last, as infinity."""
    shown = along if counted is None else along.masked_fill(~counted[:, None], torch.inf)
    found: Tensor = shown.sort(2).values
    return found


def _above(
    white: Tensor, edges: Tensor, most: int, bounded: BoundedGrams | None = None
) -> tuple[Tensor, Tensor]:
    """Return at most `most` eigenvalues (B, q) above the edges (B,), falling, and vectors (B, q, m)."""
    if white.is_cuda or bounded is not None:
        return peeled(white, edges, most, bounded)
    found = [_one_above(one, least) for one, least in zip(white.numpy(), edges.tolist(), strict=True)]
    q = min(most, max((len(values) for values, _ in found), default=0))
    top, across = np.zeros((len(white), q)), np.zeros((len(white), q, white.shape[1]))
    for place, (values, vectors) in enumerate(found):
        here = min(q, len(values))
        top[place, :here], across[place, :here] = values[::-1][:here], vectors.T[::-1][:here]
    return torch.from_numpy(top), torch.from_numpy(across)


def peeled(
    white: Tensor, edges: Tensor, most: int, bounded: BoundedGrams | None = None
) -> tuple[Tensor, Tensor]:
    """Return what `_above` returns, by finding the largest eigenpair and subtracting it, repeatedly.

    A GPU decomposes many small matrices no faster than a processor. But by squaring matrices it quickly finds
    the largest eigenvalue above an edge, if there is one.
    """
    some, tops, rows = white, list[Tensor](), list[Tensor]()
    steps = most if bounded is None else min(most, bounded.directions)
    while len(tops) < steps and len(white):
        if bounded is None:
            found = top_eigenpairs(filled_up(some), filled_up(edges))
            values, vectors = (part[: len(white)] for part in found)
        else:
            values, vectors = plain_top_eigenpairs(some, edges)
        higher = values > edges
        if bounded is None and not bool(higher.any()):
            break
        tops.append(values * higher)
        rows.append(vectors * higher[:, None])
        some = some - tops[-1][:, None, None] * vectors[:, :, None] * vectors[:, None, :]
    if bounded is not None:
        bounded.going_on.append(
            any_above(some, edges) if steps < most else torch.zeros_like(edges, dtype=torch.bool)
        )
    if not tops:
        return white.new_zeros(len(white), 0), white.new_zeros(len(white), 0, white.shape[1])
    return torch.stack(tops, 1), torch.stack(rows, 1)


def _one_above(white: Array, least: float) -> tuple[Array, Array]:
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
