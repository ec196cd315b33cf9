"""What a server makes of the messages: apply the rule, then step downhill or move towards the aggregate.

descent    w ← w − η_t R(m_1, …, m_S)
blending   w ← (1 − β) w + β R(m_1, …, m_S)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trilemma.keys import Key
from trilemma.learning.messages import Messages
from trilemma.learning.protocol import ServerFunction, ServerStep, State
from trilemma.learning.settings import Setup
from trilemma.learning.theory.schedules import Schedule

Combined = tuple[Tensor, dict[str, Any]]
"""What the rule makes of k vectors, (d,), and a report of how."""


def apply_rule(setup: Setup, vectors: Tensor, key: Key) -> Combined:
    """Apply the federation's rule and say what it did: every client's weight and how suspect it looked."""
    outcome = setup.rule(vectors, key=key.fold("rule"))
    return outcome.value, {"weights": outcome.weights, "scores": outcome.scores, "info": outcome.info}


def aggregate(setup: Setup, vectors: Tensor, key: Key) -> Combined:
    """Apply the federation's rule; where more messages than it may leave out are not finite, return NaN.

    That is what a mean of such messages is. Methods that can live with it treat NaN as "no news", the others
    diverge in the next round, and the record says so; neither is an exception here.
    """
    broken = int((~torch.isfinite(vectors).all(1)).sum())
    if broken > setup.rule.f:
        nothing = vectors.new_zeros(len(vectors))
        return torch.full_like(vectors[0], torch.nan), {"weights": nothing, "scores": nothing, "info": None}
    return apply_rule(setup, vectors, key)


def descent_server(
    setup: Setup, lr: Schedule, combine: Callable[[Setup, Tensor, Key], Combined] = apply_rule
) -> ServerFunction:
    """Return the server w ← w − η_t R(messages) of the global model."""

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        value, report = combine(setup, messages.vectors, key)
        params = {"params": state["params"] - lr(round_) * value}
        return ServerStep(params, params, report)

    return server


def blending_server(setup: Setup, name: str, beta: float = 1.0) -> ServerFunction:
    """Return the server w ← (1 − β) w + β R(messages) for the broadcast vector called `name`."""

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        value, report = aggregate(setup, messages.vectors, key)
        moved = {name: blend(state[name], value, beta)}
        return ServerStep(moved, moved, report)

    return server


def blend(before: Tensor, value: Tensor, beta: float) -> Tensor:
    """Return (1 − β) before + β value; for β = 1 the very value, whatever `before` is.

    >>> blend(torch.tensor([torch.nan]), torch.tensor([2.0]), 1.0)
    tensor([2.])
    """
    return value if beta == 1.0 else torch.lerp(before, value, beta)
