"""What an attack is: Byzantine clients replace their messages, poison their data, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.keys import Key


class Outcome(Protocol):
    """What an aggregation returns, as far as an attack reads it."""

    @property
    def value(self) -> Tensor:
        """The aggregate (d,)."""


class Target(Protocol):
    """The aggregation the attackers are up against: the very pipeline the server runs.

    A target may also be a `GramTarget`; a search against it is then cheap.
    """

    def __call__(self, vectors: Tensor, /, *, key: Key | None = None) -> Outcome:
        """Aggregate (n, d) messages; `key` serves rules that toss coins."""


@runtime_checkable
class GramTarget(Protocol):
    """A target whose aggregate is a weighted sum of the messages, with weights their Gram matrix decides.

    `geometric` is False for a target that has the method but not the property. Where `weights_from_gram`
    takes a `key` too, for steps that draw, the attackers toss with a key of their own.
    """

    @property
    def geometric(self) -> bool:
        """Whether `weights_from_gram` may be asked."""

    @property
    def weights_from_gram(self) -> Callable[..., Tensor]:
        """The map from the Gram matrix (n, n) of the messages to every client's weight (n,)."""


@runtime_checkable
class ManyGramsTarget(GramTarget, Protocol):
    """A `GramTarget` that may also weigh many Gram matrices at once, where they lie."""

    @property
    def weights_from_grams(self) -> Callable[[Tensor], Tensor] | None:
        """The map from Gram matrices (B, n, n) to weights (B, n); None: one at a time."""


@dataclass(frozen=True)
class Foreseen:
    """What would become of a round for each of B lies.

    `expelled` (B,) says where somebody is expelled; there nothing more is worked out. `move` (B, p) is how
    far the model then is from where it started, in the basis, or what has the same inner products with all of
    it; `corrected` (B,) how far it was set right.
    """

    expelled: Tensor
    move: Tensor
    corrected: Tensor


class Defence(Protocol):
    """A server in a round in which everybody sent what it computed; ready for changes."""

    @property
    def vectors(self) -> Tensor:
        """A basis (s + k + 1, d): how far each client alone moved the model, k messages, the move so far.

        A server that remembers its clients has s = n of the first, one without memory none.
        """

    def rows(self, places: Any) -> Tensor:
        """Return some vectors of the basis, in rising order."""

    @property
    def senders(self) -> Any:
        """Whose messages they are (k,)."""

    @property
    def step(self) -> float:
        """What the round's aggregate is multiplied by."""

    def looked(self) -> Defence:
        """Return the same round as if the server looked at all that clients have sent so far in it."""

    def gram(self, beside: Tensor) -> Tensor:
        """Return the Gram matrix (p, p) of the basis with more rows after it, where they lie."""

    def outcomes(self, gram: Tensor, rows: Any, changes: Tensor, beside: Tensor) -> Foreseen:
        """Return what becomes of the round when `changes` (B, r, p) are added to the messages in `rows`.

        Changes are combinations of the basis and the rows `beside` after it, of Gram matrix `gram`; it is
        worked out where both lie.
        """


@dataclass(frozen=True)
class Crafted:
    """What the Byzantine clients send in a round.

    `messages` is (f, d); its rows may share memory, so copy before writing to it. `strength` is the strength
    that was used, whether given or found; None where an attack has none.
    """

    messages: Tensor
    strength: float | None = None


@dataclass(frozen=True)
class View:
    """What colluding Byzantine clients see in a round: exactly this round's honest messages.

    `honest` (h, d) holds those messages and `own` (f, d) what the Byzantine clients would have sent had they
    followed the protocol; None when nobody computed that. `target` is the pipeline the server runs. The
    attackers draw from `key`, which is theirs: they do not see the server's coins. `positions` says which
    rows of the stacked messages are the Byzantine ones; None: the last f.

    Attackers that know everything but honest secrets also have `defence`, the server's state as a way to ask
    what would become of a lie (None: it has no memory), `truth` (d,), the honest clients' mean contribution
    without noise, `uphill` (d,), what to add to messages for the honest clients' loss to rise most at the
    model the round leads to, `unshown`, the same where the server's own examples do not show it, `errors`,
    what to add for most examples to be taken for something else when the aggregate is pushed so far (for
    several distances, from a lie before it, counted as softly as the model's best multiple does or so many
    times sharper), `mistaken`, how many are when the server hears these messages of all clients (k, d),
    `unshown_errors` and `unshown_mistaken`, both after those who go on learning have gone on,
    `trusted` (d,), the server's own message on public examples, where it measures others by one, and
    `members`, the liars' places among all clients.

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
    defence: Callable[[], Defence] | None = None
    truth: Callable[[], Tensor] | None = None
    uphill: Callable[[], Tensor] | None = None
    unshown: Callable[[], Tensor] | None = None
    errors: Callable[[float, tuple[Tensor, Tensor] | None, float], Tensor] | None = None
    mistaken: Callable[[Tensor, float], float] | None = None
    unshown_errors: Callable[[float, tuple[Tensor, Tensor] | None, float], Tensor] | None = None
    unshown_mistaken: Callable[[Tensor, float], float] | None = None
    trusted: Callable[[], Tensor] | None = None
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
        """For every row of the stack, its row in (honest messages, Byzantine messages): (n,), int64."""
        honest = self.honest.shape[0]
        rows = list(range(honest, self.clients) if self.positions is None else self.positions)
        order = torch.full((self.clients,), -1, dtype=torch.int64)
        order[rows] = torch.arange(honest, self.clients)
        order[order < 0] = torch.arange(honest)
        return order

    def stack(self, messages: Tensor) -> Tensor:
        """Return all n messages as the server receives them, with the Byzantine `messages` (f, d) put in."""
        return torch.cat([self.honest, messages])[self.order.to(self.honest.device)]


@dataclass(frozen=True)
class Attack:
    """An attack. `craft` gives the Byzantine messages; `poison` the labels Byzantine clients train on.

    `poison(labels, classes, key)` is applied once to the labels of a Byzantine client, with a key of that
    client. An attack without `craft` sends what the honest protocol computes on the poisoned data.
    `reads_own` says that `craft` needs `View.own`, `reads_truth` that it reads `View.truth`, `columnwise`
    that what it sends in a column is decided by that column of the honest messages alone.
    """

    name: str
    craft: Callable[[View], Crafted] | None = None
    poison: Callable[[Tensor, int, Key], Tensor] | None = None
    reads_own: bool = False
    reads_truth: bool = False
    columnwise: bool = False
