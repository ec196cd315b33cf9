"""What a server makes of the messages: apply the rule, then step downhill or move towards the aggregate.

descent    w ← w − η_t R(m_1, …, m_S)
blending   w ← (1 − β) w + β R(m_1, …, m_S)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trilemma.aggregation import Aggregate, Geometry, stream
from trilemma.aggregation.rule import aggregate as carry_out
from trilemma.aggregation.source import InMemory
from trilemma.keys import Key
from trilemma.learning.messages import Messages
from trilemma.learning.privatise import all_finite
from trilemma.learning.protocol import ServerFunction, ServerStep, State
from trilemma.learning.settings import Setup
from trilemma.learning.theory.schedules import Schedule
from trilemma.mapped import lies_in_a_file

BLOCK = 1 << 24
"""Numbers of messages that lie in a file which are looked at together."""

Combined = tuple[Tensor, dict[str, Any]]
"""What the rule makes of k vectors, (d,), and a report of how."""


def apply_rule(setup: Setup, vectors: Tensor, key: Key, known: Geometry | None = None) -> Combined:
    """Apply the federation's rule and say what it did: every client's weight and how suspect it looked.

    `known` is the geometry of the vectors, where somebody measured it.
    """
    outcome: Aggregate[Any]
    if known is not None:
        outcome = carry_out(setup.rule, InMemory(vectors, known), key.fold("rule"))
    elif lies_in_a_file(vectors):  # for there is no room: a few columns at a time
        outcome = stream(setup.rule, lambda: column_blocks(vectors), key=key.fold("rule"))
    else:
        outcome = setup.rule(vectors, key=key.fold("rule"))
    return outcome.value, {"weights": outcome.weights, "scores": outcome.scores, "info": outcome.info}


def column_blocks(vectors: Tensor) -> Iterator[Tensor]:
    """Yield (n, d) a few columns at a time.

    >>> [block.shape[1] for block in column_blocks(torch.zeros(4, BLOCK // 2))]
    [4194304, 4194304]
    """
    columns = max(1, BLOCK // len(vectors))
    for start in range(0, vectors.shape[1], columns):
        yield vectors[:, start : start + columns]


def aggregate(setup: Setup, vectors: Tensor, key: Key, known: Geometry | None = None) -> Combined:
    """Apply the federation's rule; where more messages than it may leave out are not finite, return NaN.

    That is what a mean of such messages is. Methods that can live with it treat NaN as "no news", the others
    diverge in the next round, and the record says so; neither is an exception here.
    """
    broken = 0 if all_finite(vectors) else sum(not bool(torch.isfinite(row).all()) for row in vectors)
    if broken > setup.rule.f:
        nothing = vectors.new_zeros(len(vectors))
        return torch.full_like(vectors[0], torch.nan), {"weights": nothing, "scores": nothing, "info": None}
    return apply_rule(setup, vectors, key, known)


def descent_server(
    setup: Setup,
    lr: Schedule,
    combine: Callable[[Setup, Tensor, Key, Geometry | None], Combined] = apply_rule,
) -> ServerFunction:
    """Return the server w ← w − η_t R(messages) of the global model."""

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        value, report = combine(setup, messages.vectors, key, messages.geometry)
        params = {"params": state["params"] - lr(round_) * value}
        return ServerStep(params, params, report)

    return server


def blending_server(setup: Setup, name: str, beta: float = 1.0) -> ServerFunction:
    """Return the server w ← (1 − β) w + β R(messages) for the broadcast vector called `name`."""

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        value, report = aggregate(setup, messages.vectors, key, messages.geometry)
        moved = {name: blend(state[name], value, beta)}
        return ServerStep(moved, moved, report)

    return server


def blend(before: Tensor, value: Tensor, beta: float) -> Tensor:
    """Return (1 − β) before + β value; for β = 1 the very value, whatever `before` is.

    >>> blend(torch.tensor([torch.nan]), torch.tensor([2.0]), 1.0)
    tensor([2.])
    """
    return value if beta == 1.0 else torch.lerp(before, value, beta)
