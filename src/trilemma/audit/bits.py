"""The bit-level test: messages that are possible under one data set only.

Noise that is added in floating-point arithmetic leaves a message whose last bits tell what was added to it:
a number that no noise whatever would have produced from the other data set. One such message is certainty,
ε = ∞. So messages are made with heads, and for each the noise is looked for that makes the very same message
with tails: any number of the noise's type is allowed, which is more than a generator can draw. Messages rise
with their noise, coordinate by coordinate, so a bisection over all numbers of the type finds it if it exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trilemma.audit.bounds import at_least
from trilemma.audit.canaries import Pair, whole
from trilemma.audit.outcomes import AuditOutcome
from trilemma.audit.subject import Subject
from trilemma.audit.trials import TrialNoise, play
from trilemma.base.keys import Key
from trilemma.learning.messages import STEPS
from trilemma.privacy import SimulatedNoise
from trilemma.privacy.types import NoiseLaw, NoiseSource

MESSAGES = 400
"""Messages that are looked at."""

_LARGEST = 0x7F7FFFFF  # the bits of the largest finite float32


@dataclass(frozen=True)
class Given:
    """Noise that somebody chose, (k, d): as float32 numbers, or as whole steps."""

    ordered: Tensor

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the numbers whose bits, in their order, were chosen."""
        bits = torch.where(self.ordered >= 0, self.ordered, -(1 << 31) - self.ordered)
        return bits.to(torch.int32).view(torch.float32)

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the steps that were chosen."""
        return self.ordered


def bits(subject: Subject, pair: Pair, key: Key, risk: float, messages: int = MESSAGES) -> AuditOutcome:
    """Return ε = ∞ where messages of the first round exclude the other data set too often for δ, else 0.

    Half of the messages are made with heads, half with tails: which one gives itself away is not known.
    """
    sent = subject.first_broadcast(pair.model, key)
    coins = np.arange(messages) % 2 == 0

    def shown(coins: np.ndarray, noise: NoiseSource) -> Tensor:
        (message,) = play(subject.algorithm, whole(pair, coins, noise), [sent], key)
        return message.beside.get(STEPS, message.vectors)

    seen = shown(coins, TrialNoise(SimulatedNoise(key.fold("noise"), 1), 1))
    possible = preimage_exists(lambda ordered: shown(~coins, Given(ordered)), seen)
    excluded = int((~possible.all(1)).sum())
    found = math.inf if at_least(excluded, messages, risk) > subject.delta else 0.0
    facts = {"messages": messages, "possible under one data set only": excluded}
    return AuditOutcome("bits", "ε", found, subject.certified, facts=facts)


def preimage_exists(rising: Callable[[Tensor], Tensor], wanted: Tensor) -> Tensor:
    """Tell for each number of `wanted` whether `rising`, applied to ordered integers, ever gives it.

    >>> preimage_exists(lambda n: 2 * n, torch.tensor([[6, 7]]))
    tensor([[ True, False]])
    """
    low = torch.full(wanted.shape, -_LARGEST, dtype=torch.int64)
    high = torch.full(wanted.shape, _LARGEST, dtype=torch.int64)
    while bool((low < high).any()):
        middle = torch.div(low + high, 2, rounding_mode="floor")
        enough = rising(middle) >= wanted
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return rising(low) == wanted
