"""What leaves a client and what the server makes of it, for methods that send models.

Without `[privacy]` client k sends its vector w_k. With it, the move away from the broadcast w is bounded and
noised, so that replacing a whole client moves the message by at most 2C:

    m_k = w + clip(w_k − w, C) + noise_k                     clip(u, C) = u · min(1, C/‖u‖)

The server applies any rule R of `trilemma.aggregation` and may move only part of the way (or beyond):

    w ← (1 − β) w + β R(m_1, …, m_S)

In lp-proj w lives in R^d, d ≪ D: noise of the same scale per coordinate then has a norm √(D/d) times smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trilemma.keys import Key
from trilemma.learning.privatise import clip_rows, noised
from trilemma.learning.protocol import Clients, Messages, ServerStep, State
from trilemma.learning.settings import AlgorithmSettings, Setup, rule_report
from trilemma.privacy.types import NoiseLaw, Release


class ExchangeSettings(AlgorithmSettings):
    """Methods whose clients send one vector a round; privacy protects the whole client."""

    def exposure(self, clip: float, examples: int) -> Release:
        """See `AlgorithmSettings.exposure`. A client's whole move is clipped, whatever data made it."""
        return Release(clip, NoiseLaw())


def publish(
    release: Release | None, clients: Clients, origin: Tensor, vectors: Tensor, round_: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what clients send (k, d) in place of `vectors`, and a report of how far that is from them."""
    if release is None:
        return vectors, {}
    moves = vectors - origin
    bounded, longer = clip_rows(moves, release.clip)
    # A move within the bound is sent as it is: w + (w_k − w) would differ from w_k by a rounding error.
    messages = torch.where(longer[:, None] > 0, origin + bounded, vectors)
    messages = noised(messages, release, clients, round_)
    return messages, {"clipped": longer, "move": torch.linalg.vector_norm(moves, dim=1)}


def blending_server(
    setup: Setup, name: str, beta: float = 1.0
) -> Callable[[Messages, State, int, Key], ServerStep]:
    """Return the server w ← (1 − β) w + β R(messages) for the broadcast vector called `name`."""

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        value, report = aggregate(setup, messages.vectors, key)
        moved = {name: torch.lerp(state[name], value, beta) if beta != 1.0 else value}
        return ServerStep(moved, moved, report)

    return server


def aggregate(setup: Setup, vectors: Tensor, key: Key) -> tuple[Tensor, dict[str, Any]]:
    """Apply the federation's rule; where more messages than it may leave out are not finite, return NaN.

    That is what a mean of such messages is. Methods that can live with it treat NaN as "no news", the others
    diverge in the next round, and the record says so; neither is an exception here.
    """
    broken = int((~torch.isfinite(vectors).all(1)).sum())
    if broken > setup.rule.f:
        nothing = vectors.new_zeros(len(vectors))
        return torch.full_like(vectors[0], torch.nan), {"weights": nothing, "scores": nothing, "info": None}
    outcome = setup.rule(vectors, key=key.fold("rule"))
    return outcome.value, rule_report(outcome)
