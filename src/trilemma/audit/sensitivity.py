"""The sensitivity test: does a neighbour's data move a release farther than the algorithm declares?

The algorithm is a black box. Neighbouring data, the same keys, noise off; over several rounds, so that state
which is carried along (momentum, error feedback, personal models) is moved too; to honest and to malicious
broadcasts. The largest distance of two releases is compared with the declaration, which is what accountants
take for granted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trilemma.audit.canaries import (
    CanaryExamples,
    Pair,
    WholeBatch,
    broadcasts,
    canary,
    canary_model,
    direction,
)
from trilemma.audit.outcomes import AuditOutcome, Value
from trilemma.audit.subject import Subject
from trilemma.audit.trials import CanaryReading, play
from trilemma.base.keys import Key
from trilemma.data.types import Features, each
from trilemma.learning.protocol import State
from trilemma.models.types import Model
from trilemma.privacy import Noiseless

ROUNDS = 6
"""Rounds that state is carried along for."""

SINGLE = 1e-5
"""How far rounding in single precision may carry a move beyond its bound, as a share of it."""


def sensitivity(subject: Subject, pairs: Sequence[Pair], key: Key, on: str) -> AuditOutcome:
    """Return the largest move of a release between the data sets of any pair; all are of one shape."""
    model = pairs[0].model
    kinds = broadcasts(subject.first_broadcast(model, key), subject.bound)
    rounds = min(ROUNDS, subject.rounds)
    served: dict[str, list[State]] = {name: [kind] * rounds for name, kind in kinds.items()}
    served["all in turn"] = [list(kinds.values())[t % len(kinds)] for t in range(rounds)]
    found, facts = 0.0, dict[str, Value]()
    for name, sent in served.items():
        heads, tails = (stacked(model, [one(pair) for pair in pairs]) for one in (_heads, _tails))
        probes = stacked(model, [pairs[0].heads] * rounds)
        reading = CanaryReading.of(subject.algorithm, probes, subject.release.law, sent, key)
        a, b = (reading.releases(play(subject.algorithm, one, sent, key)) for one in (heads, tails))
        moves = torch.linalg.vector_norm(a - b, dim=2).nan_to_num(nan=torch.inf)
        if float(moves.max()) > found:
            found = float(moves.max())
            round_, place = divmod(int(moves.argmax()), len(pairs))
            facts = {"pair": pairs[place].name, "broadcast": name, "round": round_}
    slack = 1e-12 if reading.step is not None else SINGLE
    return AuditOutcome(f"sensitivity, {on}", "move", found, subject.declared, facts=facts, slack=slack)


def _heads(pair: Pair) -> CanaryExamples:
    return pair.heads


def _tails(pair: Pair) -> CanaryExamples:
    """Return the neighbour's examples: without the canary where it is about one that comes or goes."""
    if not pair.absent:
        return pair.tails
    return CanaryExamples(each(pair.tails.x, lambda column: column[1:]), pair.tails.y[1:])


def stacked(model: Model, held: Sequence[CanaryExamples]) -> WholeBatch:
    """Return one silent client per holding; all hold equally many examples."""

    def column(name: str) -> Tensor:
        return torch.stack([one.x[name] for one in held])

    first = held[0].x
    x: Features = (
        torch.stack([one.x for one in held])
        if isinstance(first, Tensor)
        else {name: column(name) for name in first}
    )
    return WholeBatch(tuple(range(len(held))), model, Noiseless(), x, torch.stack([one.y for one in held]))


def wild_pairs(subject: Subject, dim: int, key: Key) -> list[Pair]:
    """Return pairs on the canary model: gradients short, loud, huge, not finite, opposite and unrelated."""
    release = subject.release
    model, batch = canary_model(dim), release.batch if release.unit == "example" else 2
    u, v = direction(dim, key), direction(dim, key.fold("another"))
    sizes = {"short": 0.5, "at the clip": 1.0, "loud": 1e3, "huge": 1e30, "overflowing": 1e38}
    firsts = {f"{name}, opposite": (size * u, -size * u) for name, size in sizes.items()}
    firsts |= {f"{name}, unrelated": (size * u, size * v) for name, size in sizes.items()}
    firsts |= {f"{name}, against a short one": (size * u, 1e-3 * v) for name, size in sizes.items()}
    others = [canary(release.clip * direction(dim, key.fold("other", i))) for i in range(batch)]

    def held(gradient: Tensor, factor: float = 1.0) -> CanaryExamples:
        first = canary(release.clip * gradient)
        chosen = [first, *others[1:]] if release.unit == "example" else [first] * batch
        x, y = (torch.stack(column) for column in zip(*chosen, strict=True))
        y[0] *= factor
        return CanaryExamples(x, y)

    pairs = {name: (held(a), held(b)) for name, (a, b) in firsts.items()}
    pairs |= {
        f"{factor}, against a short one": (held(u, factor), held(1e-3 * v))
        for factor in (torch.inf, torch.nan)
    }
    absent = release.adjacency == "add-remove"
    return [Pair(name, model, a, b, absent) for name, (a, b) in pairs.items()]


def own_pairs(subject: Subject, model: Model, mine: CanaryExamples, others: CanaryExamples) -> list[Pair]:
    """Return pairs on a user's own model and data: a client's examples, or one of them, changed.

    `mine` and `others` are equally many examples of two clients.
    """
    whole = subject.release.unit == "user"

    def mixed(changed: Tensor, before: Tensor) -> Tensor:
        return changed if whole else torch.cat([changed[:1], before[1:]])

    def numbers(change: float) -> Features:
        def changed(column: Tensor) -> Tensor:
            return mixed(column * change, column) if column.is_floating_point() else column

        return each(mine.x, changed)

    swapped: Features = (
        mixed(others.x, mine.x)
        if isinstance(mine.x, Tensor)
        else {name: mixed(others.x[name], column) for name, column in mine.x.items()}
    )
    other = {
        "another's": CanaryExamples(swapped, mixed(others.y, mine.y)),
        "another's label": CanaryExamples(mine.x, mixed(others.y, mine.y)),
        "blank": CanaryExamples(numbers(0.0), mine.y),
        "opposite": CanaryExamples(numbers(-1.0), mine.y),
        "times a thousand": CanaryExamples(numbers(1e3), mine.y),
        "times 1e30": CanaryExamples(numbers(1e30), mine.y),
    }
    absent = subject.release.adjacency == "add-remove"
    if absent:
        return [Pair(name, model, changed, changed, absent) for name, changed in other.items()]
    return [Pair(name, model, mine, changed) for name, changed in other.items()]
