"""What an attack is: Byzantine clients replace their messages, poison their data, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from trilemma.attacks.backdoor import Backdoor
from trilemma.base.errors import UserError
from trilemma.base.keys import Key


class Outcome(Protocol):
    """The part of an aggregation's result that attacks read."""

    @property
    def value(self) -> Tensor:
        """The aggregate (d,)."""


class Target(Protocol):
    """The aggregation under attack, exactly as the server runs it.

    A search is cheap if the target is also a `GramTarget`.
    """

    def __call__(self, vectors: Tensor, /, *, key: Key | None = None) -> Outcome:
        """Aggregate messages (n, d); rules that draw at random use `key`."""


@runtime_checkable
class GramTarget(Protocol):
    """A target whose aggregate is a weighted sum of the messages, with weights given by their Gram matrix.

    If `weights_from_gram` also takes a `key`, for rules that draw at random, attackers pass a key of their
    own: they do not know the server's.
    """

    @property
    def geometric(self) -> bool:
        """Whether the aggregate is such a sum; if False, `weights_from_gram` must not be used."""

    @property
    def weights_from_gram(self) -> Callable[..., Tensor]:
        """The map from the Gram matrix (n, n) of the messages to every client's weight (n,)."""


@runtime_checkable
class ManyGramsTarget(GramTarget, Protocol):
    """A `GramTarget` that may also weigh many Gram matrices at once, on the device where they lie."""

    @property
    def weights_from_grams(self) -> Callable[[Tensor], Tensor] | None:
        """The map from Gram matrices (B, n, n) to weights (B, n); None: one at a time."""


@dataclass(frozen=True)
class Crafted:
    """What the Byzantine clients send in a round.

    `messages` is (f, d); its rows may share memory, so copy before writing to it. `strength` is the strength
    that was used, given or searched; None if the attack has none.
    """

    messages: Tensor
    strength: float | None = None


@dataclass(frozen=True)
class View:
    """What colluding Byzantine clients know in a round.

    Attributes:
        honest: This round's honest messages (h, d).
        own: What the Byzantine clients would send if they followed the protocol (f, d); None: not computed.
        byzantine: How many of the clients heard are Byzantine, f.
        target: The aggregation as the server runs it.
        round: The round, counted from 0.
        key: The attackers' own key: they do not see the server's random draws.
        positions: The rows of the Byzantine clients among all n messages; None: the last f.
        members: The liars' places among all clients of the federation.

    >>> view = View(
    ...     honest=torch.zeros(2, 3), own=None, byzantine=1,
    ...     target=lambda x, key=None: x, round=0, key=Key(0), positions=(1,),
    ... )
    >>> view.stack(torch.ones(1, 3))[:, 0].tolist()
    [0.0, 1.0, 0.0]
    """

    honest: Tensor
    own: Tensor | None
    byzantine: int
    target: Target
    round: int
    key: Key
    positions: tuple[int, ...] | None = None
    members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.honest.ndim != 2:
            raise UserError(f"an attack needs the honest messages as (h, d); got {tuple(self.honest.shape)}")
        if not self.honest.is_floating_point():
            raise UserError(f"messages must be of a floating-point type; got {self.honest.dtype}")
        if self.byzantine < 0:
            raise UserError(f"the number of Byzantine clients must be >= 0; got {self.byzantine}")
        own = (self.byzantine, self.honest.shape[1])
        if self.own is not None and tuple(self.own.shape) != own:
            raise UserError(f"the Byzantine clients' own messages must be {own}; got {tuple(self.own.shape)}")
        if self.positions is not None and (
            len(set(self.positions)) != self.byzantine
            or len(self.positions) != self.byzantine
            or not all(0 <= row < self.clients for row in self.positions)
        ):
            raise UserError(
                f"positions must be {self.byzantine} different rows of 0 … {self.clients - 1}; "
                f"got {self.positions}"
            )

    @property
    def clients(self) -> int:
        """Number of clients n = h + f."""
        return self.honest.shape[0] + self.byzantine

    @property
    def order(self) -> Tensor:
        """For every row that the server receives, its row in [honest; Byzantine] messages: (n,), int64."""
        honest = self.honest.shape[0]
        rows = list(range(honest, self.clients) if self.positions is None else self.positions)
        order = torch.full((self.clients,), -1, dtype=torch.int64)
        order[rows] = torch.arange(honest, self.clients)
        order[order < 0] = torch.arange(honest)
        return order

    def stack(self, messages: Tensor) -> Tensor:
        """Return all n messages in the server's order: honest ones, and the Byzantine `messages` (f, d)."""
        return torch.cat([self.honest, messages])[self.order.to(self.honest.device)]


@dataclass(frozen=True)
class Attack:
    """An attack: `craft` makes the Byzantine messages, `poison` the labels that Byzantine clients train on.

    Attributes:
        name: As in configurations.
        craft: view -> messages; None: Byzantine clients follow the protocol on their (poisoned) data.
        poison: (labels, classes, key) -> labels, called once per Byzantine client with that client's key.
        reads_own: Whether `craft` needs `View.own`.
        informed: (moment, view) -> the view with what this attack knows beside a round's messages, where it
            knows more; the moment is whatever runs it: in the simulator an `engine.Moment`.
        columnwise: Whether each column of the messages depends on that column of the honest ones only.
        needs_classes: Whether it is about classes, so that targets must not be numbers.
        backdoor: The mark whose success is scored beside the model; None: the attack sets none.
    """

    name: str
    craft: Callable[[View], Crafted] | None = None
    poison: Callable[[Tensor, int, Key], Tensor] | None = None
    reads_own: bool = False
    informed: Callable[[Any, View], View] | None = None
    columnwise: bool = False
    needs_classes: bool = False
    backdoor: Backdoor | None = None
