"""Tests and corrections of many rounds at once: the candidates of liars who search.

A server looks at one round, on its host (`conviction`, `correction`). Whoever asks what would become of
hundreds of lies asks the same of as many Gram matrices (…, m, m), on the device where they lie. Everything
here says of each of them what those two say of one, up to rounding. Who is counted may differ from one to the
other: a mask (B, m), in place of rows taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation.many import any_above, plain_top_eigenpairs, top_eigenpairs
from trilemma.learning.evidence.correction import FALSELY, QUARTILES, above
from trilemma.learning.evidence.many_look import Look
from trilemma.recordings import filled_up


@dataclass(frozen=True)
class Bounded:
    """How loops run that must not wait for a device: for so many steps, whatever they find.

    So many directions are looked for, and clients are `left_out` so many times; `going_on` are (B,) where
    one of these loops would have gone on.
    """

    directions: int
    left_out: int
    going_on: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Directions:
    """Directions above the edge, at most q for each of B: see `correction.Direction`.

    `mix` and `along` are (B, q, m), zero for members that are not counted, and `shrunk` (B, q), zero where
    there is no such direction.
    """

    mix: Tensor
    along: Tensor
    shrunk: Tensor
    there: Tensor

    def only(self, some: Tensor | slice) -> Directions:
        """Return those of some of the B."""
        return Directions(*(part[some] for part in self.parts))

    def replaced(self, where: Tensor, by: Directions) -> Directions:
        """Return these directions, with others in the places `where` of the B."""
        q = max(self.there.shape[1], by.there.shape[1])

        def put(mine: Tensor, new: Tensor) -> Tensor:
            return _filled(mine, q).index_copy(0, where, _filled(new, q))

        return Directions(*(put(mine, new) for mine, new in zip(self.parts, by.parts, strict=True)))

    def where(self, some: Tensor, by: Directions) -> Directions:
        """Return these directions, with others, no more than these, where `some` (B,) is true."""

        def put(mine: Tensor, new: Tensor) -> Tensor:
            where = some.view(-1, *(1 for _ in mine.shape[1:]))
            return torch.where(where, _filled(new, mine.shape[1]), mine)

        return Directions(*(put(mine, new) for mine, new in zip(self.parts, by.parts, strict=True)))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of them, as `Directions` takes them."""
        return self.mix, self.along, self.shrunk, self.there


def _filled(part: Tensor, q: int) -> Tensor:
    """Return it with zeros for directions that are missing."""
    missing = q - part.shape[1]
    return torch.cat([part, part.new_zeros(len(part), missing, *part.shape[2:])], 1) if missing else part


@dataclass(frozen=True)
class Corrections:
    """What becomes of B moves: `kept` (B,) of each, plus y @ S, y = `mix` (B, m)."""

    kept: Tensor
    mix: Tensor


def improbable(grams: Tensor, looks: Sequence[Look]) -> Tensor:
    """Tell (L, B) which Gram matrices (L, B, m, m) of L looks prove a lie by a length or by a pair."""
    unit = grams * torch.stack([look.units for look in looks])[:, None]
    squares = unit.diagonal(dim1=2, dim2=3)
    both = squares[..., :, None] + squares[..., None, :]
    least, most, nearest, furthest = torch.stack([look.limits for look in looks])[:, :, None].unbind(1)
    more, less = both + 2 * unit, both - 2 * unit
    outside = (more < least) | (more > most) | (less < nearest) | (less > furthest)
    return outside.flatten(2).any(2)


def visible(grams: Tensor, looks: Sequence[Look], bounded: Bounded | None = None) -> list[Directions]:
    """Return the directions that stand out of the noise in Gram matrices (L, B, m, m), for each look."""
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


def apart(seen: Directions, look: Look) -> Tensor:
    """Tell (B,) where somebody is expelled for its move along a direction."""
    if not seen.there.shape[1]:
        return torch.zeros(len(seen.there), dtype=torch.bool, device=seen.there.device)
    away, scale = _from_the_middle(seen.along / look.deviation, None)
    over = away > look.reach[0] * scale + look.reach[1]
    return (over & seen.there[:, :, None]).flatten(1).any(1)


def correct(
    grams: Tensor,
    moved: Tensor,
    look: Look,
    parts: Tensor | None,
    seen: Directions,
    bounded: Bounded | None = None,
) -> Corrections:
    """Return how B moves are set right: see `correction.correct`.

    `moved` and `parts` are (B, m); `seen` is what is visible.
    """
    m, liars = grams.shape[1], look.facts.liars
    kept, mix = moved.new_ones(len(moved)), torch.zeros_like(moved)
    if not corrects(look, seen):
        return Corrections(kept, mix)
    counted = None
    if parts is not None:
        seen, counted = _left_out(grams, look, seen, bounded)
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


def corrects(look: Look, seen: Directions) -> bool:
    """Tell whether moves are set right along what is seen."""
    return look.facts.corrects and seen.there.shape[1] > 0


def _left_out(
    grams: Tensor, look: Look, seen: Directions, bounded: Bounded | None
) -> tuple[Directions, Tensor | None]:
    """Leave out who stands apart, again and again; return what is then seen, and who is counted (B, m).

    None: everybody, everywhere.
    """
    m, liars, times = grams.shape[1], look.facts.liars, 0
    counted = torch.ones(grams.shape[:2], dtype=torch.bool, device=grams.device)
    place = torch.arange(1, m + 1, device=grams.device)
    going = seen.there.any(1)  # those of the B for which this is not over
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
    grams: Tensor, look: Look, seen: Directions, counted: Tensor, going: Tensor, bounded: Bounded | None
) -> Directions:
    """Return what is seen among those who are counted (B, m) where `going` (B,), elsewhere what was seen."""
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
    bounded: Bounded | None,
) -> Directions:
    """Return the directions that stand out, at most `most` (B,), and `limit` of any, the clearest first.

    `whiten` (B, m, m) is zero beside those who are counted, `members` (B,) how many they are.
    """
    values, vectors = _above(whiten @ grams @ whiten, edges, limit, bounded)
    first = torch.arange(values.shape[1], device=grams.device)
    there = (values > edges[:, None]) & (first < most[:, None])
    top, size = torch.where(there, values, 1.0), members[:, None]
    mix = (vectors @ whiten) * (there / top.sqrt())[..., None]
    shrunk = ((top - dim - size) ** 2 - 4 * dim * size).clamp(min=0.0).sqrt() / top * there
    return Directions(mix, mix @ grams * (whiten.diagonal(dim1=1, dim2=2) > 0)[:, None], shrunk, there)


def _from_the_middle(along: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return distances (B, q, m) from the median of those counted, and their spread (B, q, 1), at least 1.

    Quantiles are those of numpy: linear between the two values next to them.
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
    """Return moves (B, q, m) in rising order, those who are not counted last."""
    shown = along if counted is None else along.masked_fill(~counted[:, None], torch.inf)
    found: Tensor = shown.sort(2).values
    return found


def _whitening(look: Look, counted: Tensor) -> Tensor:
    """Return K^(-½) (B, m, m) of those who are counted, zero beside them."""
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


def _above(white: Tensor, edges: Tensor, most: int, bounded: Bounded | None = None) -> tuple[Tensor, Tensor]:
    """Return the `most` largest eigenvalues (B, q) above the edges (B,), falling, and vectors (B, q, m)."""
    if white.is_cuda or bounded is not None:
        return peeled(white, edges, most, bounded)
    found = [above(one, least) for one, least in zip(white.numpy(), edges.tolist(), strict=True)]
    q = min(most, max((len(values) for values, _ in found), default=0))
    top, across = np.zeros((len(white), q)), np.zeros((len(white), q, white.shape[1]))
    for place, (values, vectors) in enumerate(found):
        here = min(q, len(values))
        top[place, :here], across[place, :here] = values[::-1][:here], vectors.T[::-1][:here]
    return torch.from_numpy(top), torch.from_numpy(across)


def peeled(white: Tensor, edges: Tensor, most: int, bounded: Bounded | None = None) -> tuple[Tensor, Tensor]:
    """Return eigenvalues above the edges and their vectors, one after the other, the largest first.

    A GPU takes as long for a decomposition of many small matrices as a processor. It is quick to find the
    largest eigenvalue above an edge, by squaring, if there is one.
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
        bounded.going_on.append(any_above(some, edges) if steps < most else torch.zeros_like(higher))
    if not tops:
        return white.new_zeros(len(white), 0), white.new_zeros(len(white), 0, white.shape[1])
    return torch.stack(tops, 1), torch.stack(rows, 1)
