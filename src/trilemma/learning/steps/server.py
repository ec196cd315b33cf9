"""What a server does with messages: apply the rule, then take a descent step or blend in the aggregate.

descent    w ← w − η_t R(m_1, …, m_S)
blending   w ← (1 − β) w + β R(m_1, …, m_S)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trilemma.aggregation import Aggregate, Geometry, stream
from trilemma.aggregation.passes.source import InMemory
from trilemma.aggregation.steps.rule import aggregate as carry_out
from trilemma.base.keys import Key
from trilemma.learning.messages import Messages
from trilemma.learning.protocol import ServerFunction, ServerStep, State
from trilemma.learning.settings import Setup
from trilemma.learning.steps.schedules import Schedule
from trilemma.learning.steps.total import all_finite
from trilemma.storage.mapped import lies_in_a_file

BLOCK = 1 << 24
"""How many numbers are read at once of messages that lie in a file."""

Combined = tuple[Tensor, dict[str, Any]]
"""The aggregate (d,) of k vectors, and a report of how it was made."""


def apply_rule(setup: Setup, vectors: Tensor, key: Key, known: Geometry | None = None) -> Combined:
    """Apply the federation's rule; the report holds each client's weight and score, and the rule's info.

    `known` is the geometry of the vectors if it was already measured.
    """
    outcome: Aggregate[Any]
    if known is not None:
        outcome = carry_out(setup.rule, InMemory(vectors, known), key.fold("rule"))
    elif lies_in_a_file(vectors):  # too long for memory: a few columns at a time
        outcome = stream(setup.rule, lambda: column_blocks(vectors), key=key.fold("rule"))
    else:
        outcome = setup.rule(vectors, key=key.fold("rule"))
    return outcome.value, {"weights": outcome.weights, "scores": outcome.scores, "info": outcome.info}


def column_blocks(vectors: Tensor) -> Iterator[Tensor]:
    """Yield `vectors` (n, d) a few columns at a time.

    >>> [block.shape[1] for block in column_blocks(torch.zeros(4, BLOCK // 2))]
    [4194304, 4194304]
    """
    columns = max(1, BLOCK // len(vectors))
    for start in range(0, vectors.shape[1], columns):
        yield vectors[:, start : start + columns]


def aggregate(setup: Setup, vectors: Tensor, key: Key, known: Geometry | None = None) -> Combined:
    """Apply the federation's rule; return NaN if more than f messages are not finite.

    NaN is what the mean of such messages would be. Methods that tolerate it treat NaN as "no news". The
    others diverge in the next round, and the record says so. Hence nothing is raised here.
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
    """Return (1 − β) before + β value; for β = 1 `value` itself, even if `before` is not finite.

    >>> blend(torch.tensor([torch.nan]), torch.tensor([2.0]), 1.0)
    tensor([2.])
    """
    return value if beta == 1.0 else torch.lerp(before, value, beta)
