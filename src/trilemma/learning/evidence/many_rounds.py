"""One round for many lies at once: where the model moves. On a GPU the work is replayed as a recording.

The work for a hundred lies takes a GPU one or two milliseconds, but its several hundred small launches take
the processor ten. So if all clients were heard in all rounds, the work is replayed in one piece
(`trilemma.recordings`). A recording cannot wait for its own results. Therefore all lies go through all of it,
even those that lead to an expulsion, and its loops take a fixed number of steps (`many.Bounded`,
`recordings.unasked`). If a loop of the rule needed more steps, the work is replayed in two parts, judging and
moving, and the rule computes its weights in between. If another loop needed more steps, larger numbers of
steps are tried (`STEPS`), and in the end the round is computed without a recording (`outlook`).
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
"""How many recordings are kept: one to three for every padded number of lies and every entry of `STEPS`."""

STEPS = ((1, 1), (2, 1), (4, 2))
"""How many directions are searched for, and how often clients are left out; tried in this order."""

WALK = 6
"""Steps of an iterative rule within a recording: of a hundred lies, seldom any needs more."""

_recordings = Recordings(KEPT)


@dataclass(frozen=True)
class Round:
    """The messages and sums of a round under B lies, and the looks at messages and at sums, in this order.

    `sums` is None if they are not looked at. The model moves by `step` × the aggregate.
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
        """Return the model's move since the start (B, p), and the length of its corrections (B,).

        Vectors are given by their coefficients (B, p) in the basis of `sent.gram`. `grams` and `seen` belong
        to the looks, `aggregates` (B, p) are the rule's, and `parts` are as in `many.correct`.
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
    """Return the outcomes of B lies from recordings; None if they need more steps than any recording has.

    `changes` (B, r, p), in the basis of `gram` (p, p), are added to the messages `which` (r,). `taken` (n,)
    is the sum of each client's weights so far. `rule` None: the mean.
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
    """Judge B lies and return where the model moves; the rule takes at most `WALK` steps."""
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
    """Do the same in two recordings, between which the rule takes as many steps as it needs."""
    judged = _recordings.run(("judged", steps, *facts), partial(_judged, facts, steps), given)
    # If somebody is expelled the weights do not matter: the first lie's Gram matrix stands in.
    grams = judged["grams"][0]
    weights = rule.weights(torch.where(judged["expelled"][:, None, None], grams[:1], grams))
    told = given | judged | {"weights": weights}
    return _recordings.run(("moved", steps, *facts), partial(_moved, facts, steps), told)


def _judged(facts: tuple[Facts, Facts], steps: tuple[int, int], of: Tensors) -> Tensors:
    """Return which of B lies lead to an expulsion, what each look shows, and where more steps are needed."""
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
    """Return where the model moves under B judged lies, given the rule's weights.

    A lie that leads to an expulsion has move 0. `going_on` tells whether any of the other lies needs more
    steps.
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
    """Return the names under which recordings pass the `many.Directions` of look number `place`."""
    return [f"{part} {place}" for part in ("mix", "along", "shrunk", "there")]


def _round(facts: tuple[Facts, Facts], of: Tensors) -> Round:
    n, gram, which, changes = facts[0].members, of["gram"], of["which"], of["changes"]
    sent, sums = Changed(gram, n, n, which, changes), Changed(gram, 0, n, which, of["step"] * changes)
    return Round(sent, sums, (Look(facts[0], of["fresh"]), Look(facts[1], of["whole"])), of["step"])


def _lengths(gram: Tensor, y: Tensor) -> Tensor:
    """Return the lengths (B,) of combinations (B, p) of the basis."""
    found: Tensor = torch.linalg.vecdot(y @ gram, y)
    return found.clamp(min=0.0).sqrt()
