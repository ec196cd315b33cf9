"""Tests and corrections of many rounds at once: the candidates of liars who search.

A server looks at one round, on its host (`conviction`, `correction`). Whoever asks what would become of
hundreds of lies asks the same of as many Gram matrices (…, m, m), on the device where they lie. Everything
here says of each of them what those two say of one, up to rounding. Who is counted may differ from one to the
other: a mask (B, m), in place of rows taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy
import torch
from torch import Tensor

from trilemma.aggregation.many import filled_up, top_eigenpairs
from trilemma.learning.evidence.conviction import SLACK, lengths
from trilemma.learning.evidence.correction import FALSELY, QUARTILES, above, edge
from trilemma.learning.trace import Array, Law, Places, whitened


@dataclass(frozen=True, eq=False)
class Look:
    """What is looked at, whatever is sent: vectors of m clients, who have all sent something.

    Attributes:
        rows: Which vectors they are.
        law: What they are like if their clients are honest.
        liars: How many of the clients may lie.
        alarm: With what probability honest ones may be expelled.
        shares: What scales their moves to a whole run's (m,); None: nothing is set right by them.
        device: Where Gram matrices lie.
    """

    rows: Places
    law: Law
    liars: int
    alarm: float
    shares: Array | None
    device: torch.device

    @property
    def telling(self) -> bool:
        """Whether directions are looked at."""
        return 0 < 2 * self.liars < len(self.rows)

    def corrects(self, seen: Directions) -> bool:
        """Whether moves are set right along what is seen."""
        return self.shares is not None and seen.there.shape[1] > 0

    def there(self, numbers: Array) -> Tensor:
        """Return numbers where Gram matrices lie."""
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self.device)

    @cached_property
    def deviation(self) -> Tensor:
        """The noise's standard deviation in every client's vector (m,)."""
        return self.there(self.law.deviation)

    @cached_property
    def units(self) -> Tensor:
        """What Gram matrices are multiplied by, so that noise has variance 1 (m, m)."""
        return self.there(1.0 / np.outer(self.law.deviation, self.law.deviation))

    @cached_property
    def limits(self) -> Tensor:
        """Least and largest squared lengths (4, m, m): of sums of two, and of differences; see `convict`.

        A sum of a vector with itself stands for the vector, a difference from itself for nothing.
        """
        m, law = max(len(self.rows), 1), self.law
        low, high = lengths(law.dim, self.alarm / (2 * m * m))
        slack, found = np.add.outer(law.bounds / law.deviation, law.bounds / law.deviation), []
        for scale in law.pairs:
            least = low * scale - slack
            # A lower limit below zero is none, whatever rounding makes of a length that is nothing.
            found += [np.where(least > 0, least**2, -np.inf), (high * scale + slack) ** 2]
        return self.there(np.stack(found))

    @cached_property
    def reach(self) -> Tensor:
        """How far from the median, in spreads, and how much further, a client may move (2, m)."""
        m = len(self.rows)
        high = float(scipy.special.ndtri(1 - self.alarm / (2 * m * (self.liars + 1))))
        return self.there(np.stack([np.full(m, high), SLACK * self.law.bounds / self.law.deviation]))

    @cached_property
    def sizes(self) -> Tensor:
        """The edge, and K^(-½) across the mean and along it, for up to m members who are alike (m + 1, 3)."""
        alike, dim = self.law.alike or (1.0, 0.0), self.law.dim
        counts = [max(count, 1) for count in range(len(self.rows) + 1)]
        return self.there(np.array([(edge(count, dim), *whitened(*alike, count)) for count in counts]))

    @cached_property
    def whitening(self) -> Tensor:
        """K^(-½) (m, m)."""
        return self.there(self.law.whitening)


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
        return Directions(self.mix[some], self.along[some], self.shrunk[some], self.there[some])

    def replaced(self, where: Tensor, by: Directions) -> Directions:
        """Return these directions, with others in the places `where` of the B."""
        q = max(self.there.shape[1], by.there.shape[1])

        def put(mine: Tensor, new: Tensor) -> Tensor:
            return _filled(mine, q).index_copy(0, where, _filled(new, q))

        return Directions(
            put(self.mix, by.mix),
            put(self.along, by.along),
            put(self.shrunk, by.shrunk),
            put(self.there, by.there),
        )


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


def visible(grams: Tensor, looks: Sequence[Look]) -> list[Directions]:
    """Return the directions that stand out of the noise in Gram matrices (L, B, m, m), for each look."""
    count, m = grams.shape[1:3]
    if not looks[0].telling:
        nothing = grams.new_zeros(count, 0)
        rows = nothing[..., None].expand(-1, -1, m)
        return [Directions(rows, rows, nothing, nothing > 0) for _ in looks]
    whiten = torch.stack([look.whitening for look in looks])[:, None]
    edges = torch.stack([look.sizes[m, 0] for look in looks])[:, None].expand(-1, count).flatten()
    members = edges.new_full(edges.shape, m)
    most = members.new_full(edges.shape, looks[0].liars + 1)
    flat, whitening = grams.flatten(0, 1), whiten.expand_as(grams).flatten(0, 1)
    found = _visible(flat, whitening, edges, looks[0].law.dim, members, most, looks[0].liars + 1)
    return [found.only(slice(count * place, count * (place + 1))) for place in range(len(looks))]


def apart(seen: Directions, look: Look) -> Tensor:
    """Tell (B,) where somebody is expelled for its move along a direction."""
    if not seen.there.shape[1]:
        return torch.zeros(len(seen.there), dtype=torch.bool, device=seen.there.device)
    away, scale = _from_the_middle(seen.along / look.deviation, None)
    over = away > look.reach[0] * scale + look.reach[1]
    return (over & seen.there[:, :, None]).flatten(1).any(1)


def correct(grams: Tensor, moved: Tensor, look: Look, parts: Tensor | None, seen: Directions) -> Corrections:
    """Return how B moves are set right: see `correction.correct`.

    `moved` and `parts` are (B, m); `seen` is what is visible.
    """
    m, liars = grams.shape[1], look.liars
    kept, mix = moved.new_ones(len(moved)), torch.zeros_like(moved)
    if look.shares is None or not look.corrects(seen):
        return Corrections(kept, mix)
    counted = None
    if parts is not None:
        seen, counted = _left_out(grams, look, seen)
    if counted is not None and parts is not None:
        out = parts * ~counted
        kept = 1 / (1 - out.sum(1)).clamp(min=1e-9)
        mix = -kept[:, None] * out
        moved = kept[:, None] * moved + (grams @ mix[..., None])[..., 0]
    size = torch.full_like(kept, m, dtype=torch.long) if counted is None else counted.sum(1)
    trimmed = torch.minimum((size // 4).clamp(min=liars - (m - size)), (size - 1) // 2)[:, None, None]
    place = torch.arange(m, device=grams.device)
    middle = (place >= trimmed) & (place < size[:, None, None] - trimmed)
    inside = torch.where(middle, _ranked(seen.along * look.there(look.shares), counted), 0.0).sum(2)
    gap = inside / middle.sum(2) - (seen.mix @ moved[..., None])[..., 0]
    return Corrections(kept, mix + ((seen.shrunk * gap)[:, None] @ seen.mix)[:, 0])


def _left_out(grams: Tensor, look: Look, seen: Directions) -> tuple[Directions, Tensor | None]:
    """Leave out who stands apart, again and again; return what is then seen, and who is counted (B, m).

    None: everybody, everywhere.
    """
    m, liars = grams.shape[1], look.liars
    counted = torch.ones(grams.shape[:2], dtype=torch.bool, device=grams.device)
    place = torch.arange(1, m + 1, device=grams.device)
    going = torch.nonzero(seen.there.any(1))[:, 0]  # those of the B for which this is not over
    anybody = False
    while len(going):
        some, among = seen.only(going), counted[going]
        away, scale = _from_the_middle(some.along / look.deviation, among if anybody else None)
        score = (away / scale * some.there[..., None]).amax(1).masked_fill(~among, -torch.inf)
        ranked, order = score.sort(1, descending=True)
        size = among.sum(1, keepdim=True)
        tails = 2 * some.there.sum(1, keepdim=True) * torch.special.ndtr(-ranked)
        few = (tails <= FALSELY * place / size) & (place <= size)
        last = (few * place).amax(1, keepdim=True)
        leave = torch.zeros_like(among).scatter(1, order, place <= last.clamp(max=liars - m + size))
        found = torch.nonzero(last[:, 0])[:, 0]
        if not len(found):
            break
        going, among, anybody = going[found], (among & ~leave)[found], True
        counted = counted.index_copy(0, going, among)
        inside, members = grams[going], among.sum(1)
        whiten, most = _whitening(look, among), liars - m + members + 1
        again = _visible(inside, whiten, look.sizes[members, 0], look.law.dim, members, most, liars)
        seen = seen.replaced(going, again)
        going = going[seen.there[going].any(1) & (m - members < liars)]
    return seen, counted if anybody else None


def _visible(
    grams: Tensor, whiten: Tensor, edges: Tensor, dim: int, members: Tensor, most: Tensor, limit: int
) -> Directions:
    """Return the directions that stand out, at most `most` (B,), and `limit` of any, the clearest first.

    `whiten` (B, m, m) is zero beside those who are counted, `members` (B,) how many they are.
    """
    values, vectors = _above(whiten @ grams @ whiten, edges, limit)
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
    ranked = _ranked(along, counted)
    if counted is None:
        m = along.shape[2]
        at = [(m - 1) * part for part in (0.25, 0.5, 0.75)]
        part = along.new_tensor([place % 1.0 for place in at])
        lower = ranked[..., [int(place) for place in at]]
        upper = ranked[..., [min(int(place) + 1, m - 1) for place in at]]
    else:
        last = counted.sum(1)[:, None, None] - 1
        goal = last * along.new_tensor([0.25, 0.5, 0.75])
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
    if look.law.alike is not None:
        mask, size = counted.double(), counted.sum(1)
        across, along = look.sizes[size, 1:].unbind(1)
        common = ((along - across) / size)[:, None, None] * mask[:, None]
        return torch.diag_embed(across[:, None] * mask) + common * mask[:, :, None]
    kinds, which = np.unique(counted.cpu().numpy(), axis=0, return_inverse=True)
    found = np.zeros((len(kinds), *look.law.covariance.shape))
    for one, kind in zip(found, kinds, strict=True):
        rows = np.flatnonzero(kind)
        one[np.ix_(rows, rows)] = look.law.select(rows).whitening
    return look.there(found[which.ravel()])


def _above(white: Tensor, edges: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the `most` largest eigenvalues (B, q) above the edges (B,), falling, and vectors (B, q, m)."""
    if white.is_cuda:
        return peeled(white, edges, most)
    found = [above(one, least) for one, least in zip(white.numpy(), edges.tolist(), strict=True)]
    q = min(most, max((len(values) for values, _ in found), default=0))
    top, across = np.zeros((len(white), q)), np.zeros((len(white), q, white.shape[1]))
    for place, (values, vectors) in enumerate(found):
        here = min(q, len(values))
        top[place, :here], across[place, :here] = values[::-1][:here], vectors.T[::-1][:here]
    return torch.from_numpy(top), torch.from_numpy(across)


def peeled(white: Tensor, edges: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return eigenvalues above the edges and their vectors, one after the other, the largest first.

    A GPU takes as long for a decomposition of many small matrices as a processor. It is quick to tell whether
    anything is above an edge (by a Cholesky factor), and to find the largest by squaring.
    """
    eye = torch.eye(white.shape[1], dtype=white.dtype, device=white.device)
    left, some = torch.arange(len(white), device=white.device), white
    tops: list[Tensor] = []
    rows: list[Tensor] = []
    while len(tops) < most:
        info = torch.linalg.cholesky_ex(edges[left][:, None, None] * eye - some).info
        higher = torch.nonzero(info)[:, 0]
        if not len(higher):
            break
        left, some = left[higher], some[higher]
        values, vectors = (part[: len(left)] for part in top_eigenpairs(filled_up(some)))
        tops.append(white.new_zeros(len(white)).index_copy(0, left, values))
        rows.append(white.new_zeros(white.shape[:2]).index_copy(0, left, vectors))
        some = some - values[:, None, None] * vectors[:, :, None] * vectors[:, None, :]
    if not tops:
        return white.new_zeros(len(white), 0), white.new_zeros(len(white), 0, white.shape[1])
    return torch.stack(tops, 1), torch.stack(rows, 1)
