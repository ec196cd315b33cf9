"""Lies towards errors: liars climb to where most examples are mistaken, and rehearse what comes of it.

The slope of a loss where a round leads says little about where a long push ends. So liars ask where a push of
a given length makes most examples mistaken (`Informed.errors`), search the lie that gets the model there, and
start again from where it led. Of all these lies the one is sent after which most examples are mistaken
(`Informed.mistaken`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trilemma.attacks.types import Crafted
from trilemma_lab.adversary.informed import Informed

Lie = Callable[[Tensor], tuple[Crafted, float]]
"""direction (d,) -> the most harmful lie along it, and how much further it gets the aggregate than none."""

Errors = Callable[[float, tuple[Tensor, Tensor] | None, float], Tensor]
"""As `Informed.errors`."""

Mistaken = Callable[[Tensor, float], float]
"""As `Informed.mistaken`."""

ERRING = ((1.0, 0.0), (1.0, 0.0), (1.0, -0.25), (0.9, 0.0), (1.1, 0.0), (1.0, -0.25))
"""The lies towards errors, in the order they are tried. Each pair is the distance, as a multiple of what the
best lie so far reaches, and how far the lie leans back along the gradient, relative to a length of 1. Several
are tried because the server's reaction to lies has edges."""

SECOND_SHARPNESS = 2.0
"""A second sharpness of counting errors that `unshown-errors` tries in addition to the usual one."""

CLIMBS = 4
"""The most climbs towards errors after tuning, each from the best lie before it."""

PARTS_OF_THE_WAY = (1.0, 0.5, 0.25, 0.1)
"""How far towards the end of such a climb lies go, tried in this order until one is better."""

OUTRIGHT = 64.0
"""At this sharpness an example counts as either mistaken or not. Liars who climbed at several sharpnesses
compare their results by it."""


@dataclass(frozen=True)
class Climb:
    """A lie, how `far` it gets the aggregate, and the direction (d,) it was made for; None: along `loss`."""

    crafted: Crafted
    far: float
    way: Tensor | None = None


def climbed(
    view: Informed,
    begin: Climb,
    truth: Tensor,
    lie: Lie,
    errors: Errors,
    mistaken: Mistaken,
    sharp: float,
) -> list[Climb]:
    """Return the lie `begin` and those found after it; last the one after which most examples are mistaken.

    `sharp` says how sharply mistakes are counted. Each lie starts from the best before it, because where a
    lie leads, with its noise and the server's weights, is known only after it was tried.
    """
    sent = view.stack(begin.crafted.messages)
    found, best, most = [begin], begin, mistaken(sent, sharp)
    from_, distance = None, begin.far
    for share, lean in ERRING:
        way = leaning_back(errors(share * distance, from_, sharp).to(truth), truth, lean)
        tried, reached = lie(way)
        sent = view.stack(tried.messages)
        count = mistaken(sent, sharp)
        found.append(Climb(tried, reached, way))
        if count > most:
            best, most = found[-1], count
        if reached > 0 and (best is found[-1] or from_ is None):
            from_, distance = (way, sent), reached
    return [*(one for one in found if one is not best), best]


def best_after_tuning(
    view: Informed,
    every: Sequence[Climb],
    truth: Tensor,
    lie: Lie,
    errors: Errors,
    mistaken: Mistaken,
) -> Crafted:
    """Return the lie after which most examples are mistaken once the model has been tuned.

    It is the best of `every` lie towards errors, or one found by climbing from there. Owners choose scale and
    pull anew after every lie, and the server lets some directions pass much further than others. So if the
    lie at the end of a climb is not better, one that goes only a part of the way may be. Mistakes are counted
    outright (`OUTRIGHT`), because the confidence of tuned models says nothing.
    """

    def counted(one: Climb) -> float:
        return mistaken(view.stack(one.crafted.messages), OUTRIGHT)

    best = max(every, key=counted)
    most = counted(best)
    for _ in range(CLIMBS):
        from_ = (
            None if best.way is None or not best.far > 0 else (best.way, view.stack(best.crafted.messages))
        )
        aim = errors(best.far, from_, 1.0).to(truth)
        for part in PARTS_OF_THE_WAY if best.way is not None else (1.0,):
            way = leaning_back(
                aim if best.way is None else part * aim + (1 - part) * best.way.to(aim), truth, 0.0
            )
            tried = Climb(*lie(way), way)
            if (count := counted(tried)) > most:
                best, most = tried, count
                break
        else:
            break
    return best.crafted


def leaning_back(uphill: Tensor, truth: Tensor, slant: float) -> Tensor:
    """Return the unit vector (d,) along up + slant · back; up is along `uphill`, back against the truth."""
    up, back = (one / torch.linalg.vector_norm(one).clamp(min=1e-30) for one in (uphill, -truth))
    found: Tensor = up + slant * back
    return found / float(torch.linalg.vector_norm(found).clamp(min=1e-30))
