"""A round for many lies at once, after they are judged: where the model is moved. On a GPU as a recording.

All that is done to a hundred lies takes a GPU a millisecond or two, and several hundred small launches take
the processor ten. So where nobody is missing it is replayed (`trilemma.recordings`), in one piece. A
recording cannot wait for what it finds: all lies go through all of it, those too that are expelled, and its
loops take a fixed number of steps (`many.Bounded`, `recordings.unasked`). Where the rule's should have
gone on it is replayed in two parts, one that judges and one that moves, with the rule's weights between them;
where one of the others should have, the round is worked out step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from trilemma.attacks.changed import Changed
from trilemma.attacks.types import Foreseen
from trilemma.learning.evidence import many
from trilemma.learning.evidence.many_look import Facts, Look
from trilemma.recordings import Recordings, Tensors, filled_up, unasked

KEPT = 12
"""Recordings that are kept: one to three for every number of lies that is filled up to, and of steps."""

STEPS = ((1, 1), (2, 1), (4, 2))
"""Directions that are looked for, and how often clients are left out: nearly always the first are enough."""

WALK = 6
"""Steps that a rule which walks takes without waiting: the longest of a hundred walks seldom takes more."""

_recordings = Recordings(KEPT)


@dataclass(frozen=True)
class Round:
    """Messages and sums that B lies change, and what they are looked at with: messages first.

    `sums` is None where they are not looked at. `step` is what the round's aggregate is multiplied by.
    """

    sent: Changed
    sums: Changed | None
    looks: tuple[Look, Look]
    step: float | Tensor

    def moved(
        self,
        grams: Sequence[Tensor],
        seen: Sequence[many.Directions],
        aggregates: Tensor,
        parts: Tensor,
        bounded: many.Bounded | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return how far the model then is from where it started (B, p), and how far it was set right (B,).

        `grams` and `seen` are those of the looks, `aggregates` (B, p) the rule's, `parts` as in
        `many.correct`.
        """
        gram, (fresh, whole) = self.sent.gram, self.looks
        move, corrected = self.step * aggregates, gram.new_zeros(len(aggregates))
        move[:, self.sent.start + self.sent.count] += 1.0
        if many.corrects(fresh, seen[0]):
            right = many.correct(grams[0], self.sent.beside(aggregates, fresh.rows), fresh, None, seen[0])
            once = self.step * self.sent.combined(right.mix, fresh.rows)
            move, corrected = move + once, _lengths(gram, once)
        after = move
        if self.sums is not None and many.corrects(whole, seen[1]):
            beside = self.sums.beside(move, whole.rows)
            right = many.correct(grams[1], beside, whole, parts, seen[1], bounded)
            after = right.kept[:, None] * move + self.sums.combined(right.mix, whole.rows)
            corrected = corrected + _lengths(gram, after - move)
        return after, corrected


def recordable(whole: Look, fresh: Look) -> bool:
    """Tell whether looks at everybody's sums and messages can be recorded: nobody was ever missing."""
    facts = (whole.facts, fresh.facts)
    return whole.rows is None and fresh.rows is None and all(one.alike and one.telling for one in facts)


@dataclass(frozen=True)
class Weigher:
    """A rule that gives weights (B, n) for Gram matrices (B, n, n).

    Its name tells apart all that it depends on. One that is not `recordable` weighs messages on the host.
    """

    name: Hashable
    weights: Callable[[Tensor], Tensor]
    recordable: bool


def foreseen(
    gram: Tensor,
    which: Tensor,
    changes: Tensor,
    step: float,
    whole: Look,
    fresh: Look,
    taken: Tensor,
    rule: Weigher | None,
) -> Foreseen | None:
    """Return what becomes of B lies, as recordings play it; None where it takes more steps than they have.

    `changes` (B, r, p) are added to the messages `which` (r,) of all; `taken` (n,) is what each client had
    in the model's steps so far, and `rule` weighs messages; None: their mean.
    """
    given = {
        "gram": gram,
        "changes": filled_up(changes),
        "which": which,
        "step": torch.full_like(gram[0, 0], step),
        "fresh": fresh.numbers,
        "whole": whole.numbers,
        "taken": taken,
    }
    facts, count = (fresh.facts, whole.facts), len(changes)
    named = None if rule is None else rule.name
    for steps, parts in product(STEPS, (1, 2)):
        if parts == 1 and (rule is None or rule.recordable):
            at_once = partial(_at_once, facts, steps, rule)
            found = _recordings.run(("at once", steps, named, *facts), at_once, given)
        elif parts == 2 and rule is not None:
            found = _in_two_parts(facts, steps, rule, given)
        else:
            continue
        if not bool(found["going_on"]):
            return Foreseen(*(found[part][:count] for part in ("expelled", "after", "corrected")))
    return None


def _at_once(
    facts: tuple[Facts, Facts], steps: tuple[int, int], rule: Weigher | None, of: Tensors
) -> Tensors:
    """Judge B lies and tell where the model is moved, without waiting for what the rule finds."""
    judged = _judged(facts, steps, of)
    if rule is None:
        n, count = facts[0].members, len(of["changes"])
        weights, going_on = of["gram"].new_full((count, n), 1 / n), list[Tensor]()
    else:
        with unasked(WALK) as going_on:
            weights = rule.weights(judged["grams"][0])
    judged["going_on"] = torch.stack([judged["going_on"], *going_on]).any(0)
    return _moved(facts, steps, of | judged | {"weights": weights})


def _in_two_parts(
    facts: tuple[Facts, Facts], steps: tuple[int, int], rule: Weigher, given: Tensors
) -> Tensors:
    """Do the same, with as many steps of the rule in between as it takes."""
    judged = _recordings.run(("judged", steps, *facts), partial(_judged, facts, steps), given)
    # How messages of the expelled would be weighed does not matter: as those of the first lie are.
    grams = judged["grams"][0]
    weights = rule.weights(torch.where(judged["expelled"][:, None, None], grams[:1], grams))
    told = given | judged | {"weights": weights}
    return _recordings.run(("moved", steps, *facts), partial(_moved, facts, steps), told)


def _judged(facts: tuple[Facts, Facts], steps: tuple[int, int], of: Tensors) -> Tensors:
    """Tell of B lies which are expelled, what each look shows, and where that would take more steps."""
    round_, bounded = _round(facts, of), many.Bounded(*steps)
    assert round_.sums is not None
    grams = torch.stack([round_.sent.grams(), round_.sums.grams()])
    expelled = many.improbable(grams, round_.looks).any(0)
    found = {"grams": grams}
    for place, seen in enumerate(many.visible(grams, round_.looks, bounded)):
        expelled = expelled | many.apart(seen, round_.looks[place])
        found |= dict(zip(_names(place), seen.parts, strict=True))
    return {"expelled": expelled, "going_on": bounded.going_on[0], **found}


def _moved(facts: tuple[Facts, Facts], steps: tuple[int, int], of: Tensors) -> Tensors:
    """Tell of B lies that were judged where the model is moved, given the rule's weights.

    It is not moved by those who are expelled, and it does not matter what else there is to find of them;
    `going_on` says whether there is anything to find of the others.
    """
    round_, bounded = _round(facts, of), many.Bounded(*steps)
    now = of["taken"] + of["weights"]
    parts = now / now.sum(1, keepdim=True).clamp(min=1e-300)
    seen = [many.Directions(*(of[name] for name in _names(place))) for place in range(2)]
    aggregates = round_.sent.combined(of["weights"])
    after, corrected = round_.moved((of["grams"][0], of["grams"][1]), seen, aggregates, parts, bounded)
    expelled, going_on = of["expelled"], torch.stack([of["going_on"], *bounded.going_on]).any(0)
    return {
        "expelled": expelled,
        "after": torch.where(expelled[:, None], 0.0, after),
        "corrected": torch.where(expelled, math.inf, corrected),
        "going_on": (going_on & ~expelled).any(),
    }


def _names(place: int) -> list[str]:
    """What is called what a look shows, as `many.Directions` takes it."""
    return [f"{part} {place}" for part in ("mix", "along", "shrunk", "there")]


def _round(facts: tuple[Facts, Facts], of: Tensors) -> Round:
    n, gram, which, changes = facts[0].members, of["gram"], of["which"], of["changes"]
    sent, sums = Changed(gram, n, n, which, changes), Changed(gram, 0, n, which, of["step"] * changes)
    return Round(sent, sums, (Look(facts[0], of["fresh"]), Look(facts[1], of["whole"])), of["step"])


def _lengths(gram: Tensor, y: Tensor) -> Tensor:
    """Return the lengths (B,) of combinations (B, p) of the basis."""
    found: Tensor = torch.linalg.vecdot(y @ gram, y)
    return found.clamp(min=0.0).sqrt()
