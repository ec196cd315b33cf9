"""What an attack is: Byzantine clients replace their messages, poison their data, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trilemma.keys import Key


class Target(Protocol):
    """The aggregation the attacker is up against, as far as a search needs to know it."""

    def __call__(self, vectors: Tensor) -> object:
        """Aggregate (n, d) messages; the result has a `value` (d,)."""


@dataclass(frozen=True)
class View:
    """What colluding Byzantine clients see in a round: exactly this round's honest messages.

    `own` (f, d) is what they would have sent had they been honest; None when they hold no data. `target` is
    the very rule the server runs. `position` says which rows of the stacked messages are Byzantine.
    """

    honest: Tensor
    own: Tensor | None
    byzantine: int
    target: Target
    round: int
    key: Key


@dataclass(frozen=True)
class Attack:
    """An attack. `craft` gives the Byzantine messages (f, d); `poison` the labels Byzantine clients train on.

    `poison(labels, classes, key)` is applied once to the labels of a Byzantine client. An attack without
    `craft` sends what the honest protocol computes on the poisoned data.
    """

    name: str
    craft: Callable[[View], Tensor] | None = None
    poison: Callable[[Tensor, int, Key], Tensor] | None = None
