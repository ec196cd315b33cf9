"""What liars know who know everything but honest secrets, and what they foresee of the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from trilemma.attacks.types import View


@dataclass(frozen=True)
class Foreseen:
    """What the server would do in a round, for each of B lies.

    `harm` (B,) is how far the model moves against the last vector of the basis, −∞ if somebody is expelled;
    the other two mean nothing there. `corrected` (B,) is how far the model is set right. Both are on the
    host. `move` (B, p) is the model's move since the start, as coefficients in the basis of the `Defence`, or
    a vector with the same inner products with this basis.
    """

    harm: Tensor
    corrected: Tensor
    move: Tensor

    @classmethod
    def of(cls, gram: Tensor, expelled: Tensor, move: Tensor, corrected: Tensor) -> Foreseen:
        """Return what is foreseen if lies with `expelled` (B,) get somebody expelled."""
        told = torch.stack([harm(gram, expelled, move), corrected.to(gram)]).cpu()
        return cls(told[0], told[1], move)

    @property
    def expelled(self) -> Tensor:
        """Whether somebody would be expelled (B,), bool."""
        return torch.isneginf(self.harm)


def harm(gram: Tensor, expelled: Tensor, move: Tensor) -> Tensor:
    """Return how far moves (B, p) go against the last vector of the basis (B,), −∞ where `expelled` (B,)."""
    return torch.where(expelled, -torch.inf, -(move @ gram[:, -1]))


class Defence(Protocol):
    """A server in one round, ready to evaluate changes of the messages."""

    @property
    def vectors(self) -> Tensor:
        """A basis (s + k + 1, d): the clients' sums, the k messages without lies, and the move so far.

        s = n for a server that remembers its clients, s = 0 for one without memory.
        """

    def rows(self, places: Any) -> Tensor:
        """Return the vectors of the basis at `places`, which must be in rising order."""

    @property
    def size(self) -> int:
        """How many vectors the basis has."""

    @property
    def senders(self) -> Any:
        """The clients that sent the messages (k,)."""

    @property
    def step(self) -> float:
        """The model moves by `step` × the round's aggregate."""

    def looked(self) -> Defence:
        """Return the same round as if the server looked at the sums in it."""

    def gram(self, beside: Tensor) -> Tensor:
        """Return the Gram matrix (p, p) of the basis followed by rows `beside` (q, d), on their device."""

    def outcomes(self, gram: Tensor, rows: Any, changes: Tensor, beside: Tensor) -> Foreseen:
        """Return what the server does if `changes` (B, r, p) are added to the messages in `rows` (r,).

        Changes are coefficients in the basis followed by the rows `beside`, whose Gram matrix is `gram`. The
        last of these rows is the direction in which the truth would move the model. The work is done on the
        device of `gram` and `changes`.
        """


@dataclass(frozen=True)
class Room:
    """How much of a message a contribution may be.

    `moving` numbers of a message move the model; a count may stand behind them. `clip` bounds a contribution;
    None: nothing does. Of a contribution that were the same in all rounds so far a message holds `held` times
    as much, and of this round's `latest`.
    """

    moving: int
    clip: float | None = None
    held: float = 1.0
    latest: float = 1.0


@dataclass(frozen=True)
class Informed(View):
    """A view with what such liars know in addition.

    The attributes are functions, so that nothing is computed unless an attack asks for it; None: not
    available.

    Attributes:
        defence: () -> the server with its state, to foresee what it does with lies; None: it has no memory.
        truth: () -> the honest clients' mean contribution without noise (d,).
        uphill: () -> what to add to messages (d,) to raise the honest loss most at the model after the round.
        poisoned: () -> what to add (d,) to lower the loss of honest examples with flipped labels most.
        backdoored: () -> the same for honest examples with the attack's mark, all of its target class.
        unshown: () -> as `uphill`, for the loss after tuning on examples that liars cannot influence.
        errors: (distance, lie, sharper) -> in which direction (d,) to push the aggregate over that distance
            so that most honest examples are mistaken; `lie` is (direction, messages) of an earlier lie to
            start from, and errors are counted `sharper` times as sharply as by the model's best multiple.
        mistaken: (messages (k, d) of all clients, sharper) -> the share of honest examples mistaken then.
        unshown_errors: As `errors`, after tuning.
        unshown_mistaken: As `mistaken`, after tuning.
        trusted: () -> the server's own message on public examples (d,), if it compares messages with one.
        room: () -> how long a contribution may be, and what a message holds of it.
    """

    defence: Callable[[], Defence] | None = None
    truth: Callable[[], Tensor] | None = None
    uphill: Callable[[], Tensor] | None = None
    poisoned: Callable[[], Tensor] | None = None
    backdoored: Callable[[], Tensor] | None = None
    unshown: Callable[[], Tensor] | None = None
    errors: Callable[[float, tuple[Tensor, Tensor] | None, float], Tensor] | None = None
    mistaken: Callable[[Tensor, float], float] | None = None
    unshown_errors: Callable[[float, tuple[Tensor, Tensor] | None, float], Tensor] | None = None
    unshown_mistaken: Callable[[Tensor, float], float] | None = None
    trusted: Callable[[], Tensor] | None = None
    room: Callable[[], Room] | None = None

    @classmethod
    def of(cls, view: View) -> Informed:
        """Return the view as one of these: as it is, or else with nothing known in addition."""
        if isinstance(view, Informed):
            return view
        return cls(**{one.name: getattr(view, one.name) for one in fields(View)})
