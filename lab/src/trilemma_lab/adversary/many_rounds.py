"""One round for many lies at once: where the model moves. On a GPU the work is replayed as a recording.

The work for a hundred lies takes a GPU one or two milliseconds, but its several hundred small launches take
the processor ten. So if all clients were heard in all rounds, the work is replayed in one piece
(`trilemma.base.recordings`). A recording cannot wait for its own results. Therefore all lies go through all
of it, even those that lead to an expulsion, and its loops take a fixed number of steps (`BoundedGrams`,
`recordings.unasked`). If a loop needed more, larger numbers are tried: `WALKS` for the rule, `STEPS` for the
others. Beyond them the work is replayed in two parts, judging and moving, between which the rule takes as
many steps as it needs; or, for the other loops, the round is computed without a recording (`lookahead`). How
many steps are needed depends more on the honest noise than on the lie, so the next lies of a round begin with
what the last ones needed (`SearchEffort`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trilemma.base.recordings import Recordings, Tensors, aside, at_least, filled_up, unasked
from trilemma.learning.defences.evidence import conviction, correction
from trilemma.learning.defences.evidence.directions import BoundedGrams, Directions, visible
from trilemma.learning.defences.evidence.limits import LookFacts, LookLimits
from trilemma_lab.adversary.changed import Changed
from trilemma_lab.adversary.informed import Foreseen, harm

KEPT = 16
"""How many recordings are kept: a few for every padded number of lies."""

STEPS = ((1, 1), (2, 1), (4, 2))
"""How many directions are searched for, and how often clients are left out; tried in this order."""

WALKS, FIRST_WALK = (3, 5, 9), 5
"""Steps of an iterative rule within a recording, and how many the first lies of a round take."""

_recordings = Recordings(KEPT)


@dataclass(frozen=True)
class ForeseenRound:
    """The messages and sums of a round under B lies, and the looks at messages and at sums, in this order.

    `sums` is None if they are not looked at. The model moves by `step` × the aggregate.
    """

    sent: Changed
    sums: Changed | None
    looks: tuple[LookLimits, LookLimits]
    step: float | Tensor

    def moved(
        self,
        grams: Sequence[Tensor],
        seen: Sequence[Directions],
        counted: Tensor | None,
        aggregates: Tensor,
        parts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the model's move since the start (B, p), and the length of its corrections (B,).

        Vectors are given by their coefficients (B, p) in the basis of `sent.gram`. `grams` and `seen` belong
        to the looks; those of the sums, and `counted`, are what `correction.left_out` returned. `aggregates`
        (B, p) are the rule's, and `parts` are as in `correction.corrected`.
        """
        gram, (fresh, whole) = self.sent.gram, self.looks
        move, corrected = self.step * aggregates, gram.new_zeros(len(aggregates))
        move[:, self.sent.start + self.sent.count] += 1.0
        if correction.corrects(fresh, seen[0]):
            right = correction.corrected(grams[0], self.sent.beside(aggregates, fresh.rows), fresh, seen[0])
            once = self.step * self.sent.combined(right.mix, fresh.rows)
            move, corrected = move + once, _lengths(gram, once)
        after = move
        if self.sums is not None and correction.corrects(whole, seen[1]):
            beside = self.sums.beside(move, whole.rows)
            right = correction.corrected(grams[1], beside, whole, seen[1], parts, counted)
            after = right.scale[:, None] * move + self.sums.combined(right.mix, whole.rows)
            corrected = corrected + _lengths(gram, after - move)
        return after, corrected


def recordable(whole: LookLimits, fresh: LookLimits) -> bool:
    """Tell whether looks at sums and messages can be recorded: all clients were heard in all rounds."""
    facts = (whole.facts, fresh.facts)
    return whole.rows is None and fresh.rows is None and all(one.alike and one.telling for one in facts)


@dataclass(frozen=True)
class Weigher:
    """A rule that returns weights (B, n) for Gram matrices (B, n, n).

    `name` identifies everything the weights depend on. A rule that is not `recordable` works on the host.
    """

    name: Hashable
    weights: Callable[[Tensor], Tensor]
    recordable: bool


@dataclass
class SearchEffort:
    """How many steps the lies of a round need: the place in `STEPS`, and the steps of the rule.

    `walk` is infinite once the rule has needed more steps than any recording has.
    """

    looks: int = 0
    walk: float = FIRST_WALK


def foreseen(
    gram: Tensor,
    which: Tensor,
    changes: Tensor,
    step: float,
    whole: LookLimits,
    fresh: LookLimits,
    taken: Tensor,
    rule: Weigher | None,
    effort: SearchEffort | None = None,
) -> Foreseen | None:
    """Return the outcomes of B lies from recordings; None if they need more steps than any recording has.

    `changes` (B, r, p), in the basis of `gram` (p, p), are added to the messages `which` (r,). `taken` (n,)
    is the sum of each client's weights so far. `rule` None: the mean. `effort` is what the last lies of this
    round needed, and becomes what these need.
    """
    effort, count = effort or SearchEffort(), len(changes)
    given = {
        "gram": gram,
        "changes": filled_up(changes),
        "which": which,
        "step": torch.full_like(gram[0, 0], step),
        "fresh": fresh.numbers,
        "whole": whole.numbers,
        "taken": taken,
    }
    facts = (fresh.facts, whole.facts)
    while effort.looks < len(STEPS):
        steps, walk = STEPS[effort.looks], _walk(rule, effort)
        if rule is None or walk is not None:
            name = ("at once", steps, walk, None if rule is None else rule.name, *facts)
            found = _recordings.run(name, partial(_at_once, facts, steps, walk or 0, rule), given)
        else:
            found = _in_two_parts(facts, steps, rule, given)
        told = found["told"][:, :count].cpu()  # waits for the device
        walked = float(told[3].amax())
        if bool(told[2].any()):
            effort.looks += 1
        elif walk is not None and walked > walk:
            effort.walk = walked
        else:
            effort.walk = math.inf if walk is None else walked
            return Foreseen(told[0], told[1], found["after"][:count])
    return None


def _walk(rule: Weigher | None, effort: SearchEffort) -> int | None:
    """Return how many steps a recording gives the rule; None if the rule works between two recordings."""
    if rule is None:
        return 0
    return next(iter(at_least(WALKS, effort.walk)), None) if rule.recordable else None


def _at_once(
    facts: tuple[LookFacts, LookFacts], steps: tuple[int, int], walk: int, rule: Weigher | None, of: Tensors
) -> Tensors:
    """Judge B lies and return where the model moves; the rule takes at most `walk` steps meanwhile."""
    grams = _grams(facts, of)

    def weighed() -> Tensors:
        if rule is None:
            n, count = facts[0].members, len(of["changes"])
            weights, needed = of["gram"].new_full((count, n), 1 / n), list[Tensor]()
        else:
            with unasked(walk) as needed:
                weights = rule.weights(grams[0])
        walked = torch.stack(needed).amax(0) if needed else torch.zeros_like(weights[:, 0])
        return {"weights": weights, "walked": walked}

    by_the_rule = aside(weighed)
    judged = _tested(facts, steps, of | {"grams": grams})
    return _moved(facts, of | judged | by_the_rule())


def _in_two_parts(
    facts: tuple[LookFacts, LookFacts], steps: tuple[int, int], rule: Weigher, given: Tensors
) -> Tensors:
    """Do the same in two recordings, between which the rule takes as many steps as it needs."""
    judged = _recordings.run(("judged", steps, *facts), partial(_judged, facts, steps), given)
    # If somebody is expelled the weights do not matter: the first lie's Gram matrix stands in.
    grams = judged["grams"][0]
    weights = rule.weights(torch.where(judged["expelled"][:, None, None], grams[:1], grams))
    told = given | judged | {"weights": weights, "walked": torch.zeros_like(weights[:, 0])}
    return _recordings.run(("moved", *facts), partial(_moved, facts), told)


def _judged(facts: tuple[LookFacts, LookFacts], steps: tuple[int, int], of: Tensors) -> Tensors:
    """Return the Gram matrices of B lies and what tests make of them: the first of two parts."""
    return _tested(facts, steps, of | {"grams": _grams(facts, of)})


def _grams(facts: tuple[LookFacts, LookFacts], of: Tensors) -> Tensor:
    """Return the Gram matrices (2, B, n, n) of messages and sums."""
    round_ = _round(facts, of)
    assert round_.sums is not None
    return torch.stack([round_.sent.grams(), round_.sums.grams()])


def _tested(facts: tuple[LookFacts, LookFacts], steps: tuple[int, int], of: Tensors) -> Tensors:
    """Return which of B lies lead to an expulsion, what each look shows, and where more steps are needed.

    If sums are set right, their directions are those seen once members who stand apart are left out, and
    `counted` (B, n) says who is not left out.
    """
    looks, bounded, grams = _round(facts, of).looks, BoundedGrams(*steps), of["grams"]
    by_pairs = aside(lambda: conviction.improbable(grams, looks).any(0))
    seen = visible(grams, looks, bounded)
    by_directions = aside(
        lambda: torch.stack([conviction.apart(*both) for both in zip(seen, looks, strict=True)]).any(0)
    )
    sums, counted = correction.left_out(grams[1], looks[1], seen[1], bounded)
    if counted is None:  # nothing is set right by this look
        counted = torch.ones_like(grams[1, :, 0], dtype=torch.bool)
    found = {"grams": grams, "counted": counted, "going_on": torch.stack(bounded.going_on).any(0)}
    for place, shown in enumerate((seen[0], sums)):
        found |= dict(zip(_names(place), shown.parts, strict=True))
    return {"expelled": by_pairs() | by_directions(), **found}


def _moved(facts: tuple[LookFacts, LookFacts], of: Tensors) -> Tensors:
    """Return where the model moves under B judged lies, given the rule's weights.

    A lie that leads to an expulsion has move 0. What the host reads is in one tensor, `told` (4, B): harm,
    how far the model is set right, whether a look needs more steps, and how many steps the rule took; the
    last two are 0 for lies that lead to an expulsion.
    """
    round_, expelled, grams = _round(facts, of), of["expelled"], of["grams"].unbind()
    now = of["taken"] + of["weights"]
    parts = now / now.sum(1, keepdim=True).clamp(min=1e-300)
    seen = [Directions(*(of[name] for name in _names(place))) for place in range(2)]
    aggregates = round_.sent.combined(of["weights"])
    after, corrected = round_.moved(grams, seen, of["counted"], aggregates, parts)
    after = torch.where(expelled[:, None], 0.0, after)
    told = (
        harm(of["gram"], expelled, after),
        torch.where(expelled, math.inf, corrected),
        (of["going_on"] & ~expelled).to(after),
        torch.where(expelled, 0.0, of["walked"]),
    )
    return {"after": after, "told": torch.stack(told)}


def _names(place: int) -> list[str]:
    """Return the names under which recordings pass the `Directions` of look number `place`."""
    return [f"{part} {place}" for part in ("mix", "along", "shrunk", "there")]


def _round(facts: tuple[LookFacts, LookFacts], of: Tensors) -> ForeseenRound:
    n, gram, which, changes = facts[0].members, of["gram"], of["which"], of["changes"]
    sent, sums = Changed(gram, n, n, which, changes), Changed(gram, 0, n, which, of["step"] * changes)
    return ForeseenRound(
        sent, sums, (LookLimits(facts[0], of["fresh"]), LookLimits(facts[1], of["whole"])), of["step"]
    )


def _lengths(gram: Tensor, y: Tensor) -> Tensor:
    """Return the lengths (B,) of combinations (B, p) of the basis."""
    found: Tensor = torch.linalg.vecdot(y @ gram, y)
    return found.clamp(min=0.0).sqrt()
