"""Tests and corrections of many Gram matrices at once, for liars who search among many lies.

A server tests one Gram matrix per round, on its host (`conviction`, `correction`). Liars who foresee what the
server does with hundreds of lies need the same for as many Gram matrices (…, m, m), on the device where these
lie. The functions here return for each of them what those two modules return for one, up to rounding. A mask
(B, m) says which members are counted, instead of taking rows out, because they may differ between the B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation.passes.many import any_above, plain_top_eigenpairs, top_eigenpairs
from trilemma.base.recordings import filled_up
from trilemma.learning.defences.evidence.correction import FALSELY, QUARTILES, above
from trilemma_lab.adversary.many_look import ManyLook


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
    """Directions above the edge, at most q for each of B matrices: see `correction.Direction`.

    `mix` and `along` are (B, q, m), zero for members that are not counted. At places without a direction,
    `shrunk` (B, q) is zero and `there` (B, q) is False.
    """

    mix: Tensor
    along: Tensor
    shrunk: Tensor
    there: Tensor

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


@dataclass(frozen=True)
class Corrections:
    """How B moves are set right: each becomes kept · move + Sᵀ mix, with `kept` (B,) and `mix` (B, m)."""

    kept: Tensor
    mix: Tensor


def improbable(grams: Tensor, looks: Sequence[ManyLook]) -> Tensor:
    """Tell (L, B) which Gram matrices (L, B, m, m) of L looks prove a lie by lengths or pairs."""
    unit = grams * torch.stack([look.units for look in looks])[:, None]
    squares = unit.diagonal(dim1=2, dim2=3)
    both = squares[..., :, None] + squares[..., None, :]
    least, most, nearest, furthest = torch.stack([look.limits for look in looks])[:, :, None].unbind(1)
    more, less = both + 2 * unit, both - 2 * unit
    outside = (more < least) | (more > most) | (less < nearest) | (less > furthest)
    return outside.flatten(2).any(2)


def visible(
    grams: Tensor, looks: Sequence[ManyLook], bounded: BoundedGrams | None = None
) -> list[Directions]:
    """Return, for each of L looks, the directions that stand out in its Gram matrices (L, B, m, m)."""
    (count, m), facts = grams.shape[1:3], looks[0].facts
    if not facts.telling:
        nothing = grams.new_zeros(count, 0)
        rows = nothing[..., None].expand(-1, -1, m)
        return [Directions(rows, rows, nothing, nothing > 0) for _ in looks]
    whiten = torch.stack([look.whitening for look in looks])[:, None]
    edges = torch.stack([look.sizes[m, 0] for look in looks])[:, None].expand(-1, count).flatten()
    members = edges.new_full(edges.shape, m)
    most = members.new_full(edges.shape, facts.liars + 1)
    flat, whitening = grams.flatten(0, 1), whiten.expand_as(grams).flatten(0, 1)
    found = _visible(flat, whitening, edges, facts.dim, members, most, facts.liars + 1, bounded)
    if bounded is not None:
        bounded.going_on.append(bounded.going_on.pop().view(-1, count).any(0))
    return [found.only(slice(count * place, count * (place + 1))) for place in range(len(looks))]


def apart(seen: Directions, look: ManyLook) -> Tensor:
    """Tell (B,) where a client is expelled for its move along a direction."""
    if not seen.there.shape[1]:
        return torch.zeros(len(seen.there), dtype=torch.bool, device=seen.there.device)
    away, scale = _from_the_middle(seen.along / look.deviation, None)
    over = away > look.reach[0] * scale + look.reach[1]
    return (over & seen.there[:, :, None]).flatten(1).any(1)


def correct(
    grams: Tensor,
    moved: Tensor,
    look: ManyLook,
    seen: Directions,
    parts: Tensor | None = None,
    counted: Tensor | None = None,
) -> Corrections:
    """Return how B moves are set right: see `correction.correct`.

    `moved` and `parts` are (B, m). Where members were left out, `seen` and `counted` (B, m) are what
    `left_out` returned; `counted` None: nobody was.
    """
    m, liars = grams.shape[1], look.facts.liars
    kept, mix = moved.new_ones(len(moved)), torch.zeros_like(moved)
    if not corrects(look, seen):
        return Corrections(kept, mix)
    if counted is not None and parts is not None:
        out = parts * ~counted
        kept = 1 / (1 - out.sum(1)).clamp(min=1e-9)
        mix = -kept[:, None] * out
        moved = kept[:, None] * moved + (grams @ mix[..., None])[..., 0]
    size = torch.full_like(kept, m, dtype=torch.long) if counted is None else counted.sum(1)
    trimmed = torch.minimum((size // 4).clamp(min=liars - (m - size)), (size - 1) // 2)[:, None, None]
    place = torch.arange(m, device=grams.device)
    middle = (place >= trimmed) & (place < size[:, None, None] - trimmed)
    inside = torch.where(middle, _ranked(seen.along * look.shares, counted), 0.0).sum(2)
    gap = inside / middle.sum(2) - (seen.mix @ moved[..., None])[..., 0]
    return Corrections(kept, mix + ((seen.shrunk * gap)[:, None] @ seen.mix)[:, 0])


def corrects(look: ManyLook, seen: Directions) -> bool:
    """Tell whether a look sets moves right and any direction is seen."""
    return look.facts.corrects and seen.there.shape[1] > 0


def left_out(
    grams: Tensor, look: ManyLook, seen: Directions, bounded: BoundedGrams | None = None
) -> tuple[Directions, Tensor | None]:
    """Leave out members who stand apart, repeatedly; return the directions then seen, and a mask (B, m).

    `seen` are the visible directions of all members. The mask says who is still counted; None: all members of
    all B.
    """
    if not corrects(look, seen):
        return seen, None
    m, liars, times = grams.shape[1], look.facts.liars, 0
    counted = torch.ones(grams.shape[:2], dtype=torch.bool, device=grams.device)
    place = torch.arange(1, m + 1, device=grams.device)
    going = seen.there.any(1)  # where the loop goes on
    while True:
        away, scale = _from_the_middle(seen.along / look.deviation, counted if times else None)
        score = (away / scale * seen.there[..., None]).amax(1).masked_fill(~counted, -torch.inf)
        ranked, order = score.sort(1, descending=True)
        size = counted.sum(1, keepdim=True)
        tails = 2 * seen.there.sum(1, keepdim=True) * torch.special.ndtr(-ranked)
        few = (tails <= FALSELY * place / size) & (place <= size)
        last = (few * place).amax(1, keepdim=True)
        going = going & (last[:, 0] > 0)
        leave = torch.zeros_like(counted).scatter(1, order, place <= last.clamp(max=liars - m + size))
        if bounded is None and not bool(going.any()):
            return seen, counted if times else None
        if bounded is not None and times == bounded.left_out:
            bounded.going_on.append(going)
            return seen, counted
        counted = counted & ~(leave & going[:, None])
        times += 1
        seen = _seen_again(grams, look, seen, counted, going, bounded)
        going = going & seen.there.any(1) & (m - counted.sum(1) < liars)


def _seen_again(
    grams: Tensor,
    look: ManyLook,
    seen: Directions,
    counted: Tensor,
    going: Tensor,
    bounded: BoundedGrams | None,
) -> Directions:
    """Return the directions among counted members (B, m) where `going` (B,) is true, elsewhere `seen`."""
    m, liars = grams.shape[1], look.facts.liars
    if bounded is None:
        places = torch.nonzero(going)[:, 0]
        grams, counted = grams[places], counted[places]
    members = counted.sum(1)
    whiten, most = _whitening(look, counted), liars - m + members + 1
    again = _visible(grams, whiten, look.sizes[members, 0], look.facts.dim, members, most, liars, bounded)
    if bounded is None:
        return seen.replaced(places, again)
    bounded.going_on.append(bounded.going_on.pop() & going)
    return seen.where(going, again)


def _visible(
    grams: Tensor,
    whiten: Tensor,
    edges: Tensor,
    dim: int,
    members: Tensor,
    most: Tensor,
    limit: int,
    bounded: BoundedGrams | None,
) -> Directions:
    """Return the directions that stand out, the largest eigenvalue first; at most `most` (B,) and `limit`.

    `whiten` (B, m, m) is zero in rows and columns of members that are not counted; `members` (B,) are.
    """
    values, vectors = _above(whiten @ grams @ whiten, edges, limit, bounded)
    first = torch.arange(values.shape[1], device=grams.device)
    there = (values > edges[:, None]) & (first < most[:, None])
    top, size = torch.where(there, values, 1.0), members[:, None]
    mix = (vectors @ whiten) * (there / top.sqrt())[..., None]
    shrunk = ((top - dim - size) ** 2 - 4 * dim * size).clamp(min=0.0).sqrt() / top * there
    return Directions(mix, mix @ grams * (whiten.diagonal(dim1=1, dim2=2) > 0)[:, None], shrunk, there)


def _from_the_middle(along: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return distances (B, q, m) from the median of counted members, and their spread (B, q, 1), at least 1.

    Quantiles are interpolated linearly, as numpy does. See `correction.from_the_middle`.
    """
    ranked, quarters = _ranked(along, counted), 0.25 * torch.arange(1, 4, device=along.device)
    if counted is None:
        m = along.shape[2]
        at = [(m - 1) * part for part in (0.25, 0.5, 0.75)]
        part = ((m - 1) * quarters.to(along)).frac()
        lower = torch.stack([ranked[..., int(place)] for place in at], -1)
        upper = torch.stack([ranked[..., min(int(place) + 1, m - 1)] for place in at], -1)
    else:
        last = counted.sum(1)[:, None, None] - 1
        goal = last * quarters.to(along)
        start, part = goal.long().expand(-1, along.shape[1], -1), goal.frac()
        lower, upper = ranked.gather(2, start), ranked.gather(2, torch.minimum(start + 1, last))
    low, middle, high = (lower + part * (upper - lower)).unbind(2)
    return (along - middle[..., None]).abs(), ((high - low) / QUARTILES).clamp(min=1.0)[..., None]


def _ranked(along: Tensor, counted: Tensor | None) -> Tensor:
    """Return moves (B, q, m) in rising order, those of members that are not counted last, as infinity."""
    shown = along if counted is None else along.masked_fill(~counted[:, None], torch.inf)
    found: Tensor = shown.sort(2).values
    return found


def _whitening(look: ManyLook, counted: Tensor) -> Tensor:
    """Return K^(-½) (B, m, m) of the counted members, zero in the rows and columns of the others."""
    if look.facts.alike:
        mask, size = counted.double(), counted.sum(1)
        across, along = look.sizes[size, 1:].unbind(1)
        common = ((along - across) / size)[:, None, None] * mask[:, None]
        return torch.diag_embed(across[:, None] * mask) + common * mask[:, :, None]
    assert look.law is not None
    kinds, which = np.unique(counted.cpu().numpy(), axis=0, return_inverse=True)
    found = np.zeros((len(kinds), *look.law.covariance.shape))
    for one, kind in zip(found, kinds, strict=True):
        rows = np.flatnonzero(kind)
        one[np.ix_(rows, rows)] = look.law.select(rows).whitening
    return torch.from_numpy(found[which.ravel()]).to(counted.device)


def _above(
    white: Tensor, edges: Tensor, most: int, bounded: BoundedGrams | None = None
) -> tuple[Tensor, Tensor]:
    """Return at most `most` eigenvalues (B, q) above the edges (B,), falling, and vectors (B, q, m)."""
    if white.is_cuda or bounded is not None:
        return peeled(white, edges, most, bounded)
    found = [above(one, least) for one, least in zip(white.numpy(), edges.tolist(), strict=True)]
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
