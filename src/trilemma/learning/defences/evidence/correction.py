"""What is visible but proves nothing: the model is set right along directions that stand out of the noise.

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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trilemma.learning.defences.evidence.directions import (
    BoundedGrams,
    Directions,
    among,
    from_the_middle,
    ranked,
    visible,
)
from trilemma.learning.defences.evidence.limits import LookLimits
from trilemma.learning.steps.trace import Array, Law

FALSELY = 0.2
"""The expected share of honest members among those left out because they stand apart, at most."""

UNUSED = 0.5
"""An alarm where nobody is convicted."""


@dataclass(frozen=True)
class Correction:
    """How a move is set right: it becomes scale · move + Sᵀ mix, with `mix` (m,)."""

    scale: float
    mix: Array


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
    seen: Directions | None = None,
) -> Correction:
    """Return how the model's move is set right; if no direction is above the edge, it stays as it is.

    `gram` (m, m) is the Gram matrix of the members' sums, `moved` (m,) their inner products with the model's
    move; at most `liars` of them lie. `shares` (m,) scale up the sums of members that were not heard in every
    round; None: all 1. `parts` (m,) are the members' shares in the move; None: nobody is left out. `seen` are
    the visible directions of the members that sent something; None: they are computed.
    """
    heard, mix = law.participating, np.zeros(len(gram))
    if len(heard) < 2 * liars + 1 or not liars:
        return Correction(1.0, mix)
    known, here = law.select(heard), np.ix_(heard, heard)
    look = LookLimits.of(known, liars, UNUSED, np.ones(len(heard)) if shares is None else shares[heard])
    grams, own = torch.from_numpy(gram[here])[None], torch.from_numpy(moved[heard])[None]
    seen = visible(grams[None], [look])[0] if seen is None else seen
    counted, taken = None, None
    if parts is not None:
        taken = torch.from_numpy(parts[heard])[None]
        seen, counted = left_out(grams, look, seen)
    found = corrected(grams, own, look, seen, taken, counted)
    mix[heard] = found.mix[0].numpy()
    return Correction(float(found.scale[0]), mix)


@dataclass(frozen=True)
class Corrections:
    """How B moves are set right: each becomes scale · move + Sᵀ mix, with `scale` (B,) and `mix` (B, m)."""

    scale: Tensor
    mix: Tensor


def corrected(
    grams: Tensor,
    moved: Tensor,
    look: LookLimits,
    seen: Directions,
    parts: Tensor | None = None,
    counted: Tensor | None = None,
) -> Corrections:
    """Return how B moves are set right: see `correct`.

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
    inside = torch.where(middle, ranked(seen.along * look.shares, counted), 0.0).sum(2)
    gap = inside / middle.sum(2) - (seen.mix @ moved[..., None])[..., 0]
    return Corrections(kept, mix + ((seen.shrunk * gap)[:, None] @ seen.mix)[:, 0])


def corrects(look: LookLimits, seen: Directions) -> bool:
    """Tell whether a look sets moves right and any direction is seen."""
    return look.facts.corrects and len(seen) > 0


def left_out(
    grams: Tensor, look: LookLimits, seen: Directions, bounded: BoundedGrams | None = None
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
        away, scale = from_the_middle(seen.along / look.deviation, counted if times else None)
        score = (away / scale * seen.there[..., None]).amax(1).masked_fill(~counted, -torch.inf)
        falling, order = score.sort(dim=1, descending=True, stable=True)
        size = counted.sum(1, keepdim=True)
        tails = 2 * seen.there.sum(1, keepdim=True) * torch.special.ndtr(-falling)
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
    look: LookLimits,
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
    white, edges = whiten @ grams @ whiten, look.sizes[members, 0]
    again = among(grams, white, whiten, edges, look.facts.dim, most, liars, bounded)
    if bounded is None:
        return seen.replaced(places, again)
    bounded.going_on.append(bounded.going_on.pop() & going)
    return seen.where(going, again)


def _whitening(look: LookLimits, counted: Tensor) -> Tensor:
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
