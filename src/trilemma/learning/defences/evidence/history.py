"""What a defended server has on its clients, as part of its state.

A client keeps its row for the whole run. A client that joins later gets a new row, and rows are never reused.
The noise law is kept per round, because in a federation it may change when a client joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.learning.defences.evidence.conviction import Expulsion, proved
from trilemma.learning.defences.evidence.spare import Spare
from trilemma.learning.protocol import State
from trilemma.learning.steps.trace import Law, Places
from trilemma.storage.mapped import beside, lies_in_a_file

PREFIX = "evidence."

TOGETHER = 1 << 22
"""How many numbers are processed at once of sums that lie in a file on disk."""

LONG = ("sums", "origin", "moved")
"""Parts with one number per coordinate of the model."""

PER_CLIENT = ("sums", "coefficients", "carried", "sharing", "proved", "weights")
"""Parts with one row per client, which is zero until the client is heard."""


@dataclass(frozen=True)
class ClientHistory:
    """What the server has on its clients; `trilemma.learning.steps.trace` defines the symbols.

    Attributes:
        sums: S (n, d), what each client alone would have moved the model by so far.
        coefficients: c (n, T), of each round's release in a client's sum.
        carried: p (n, T), of each round's release in a client's last message.
        own: σ_ind² (T,).
        shared: σ_cor² (T,).
        sharing: Which clients shared secrets in each round (n, T), bool; nobody in rounds that were not held.
        clips: C(s) (T,).
        members: Which clients are still in (n,), bool.
        proved: How many liars each client's expulsion proves (n,): 1, or 0.5 for each of a pair.
        weights: The sum of each client's weights in the rounds' aggregates (n,).
        origin: The initial model θ_0 (d,).
        moved: How far the rounds' aggregates have moved the model (d,), less what was undone.
    """

    sums: Tensor
    coefficients: Tensor
    carried: Tensor
    own: Tensor
    shared: Tensor
    sharing: Tensor
    clips: Tensor
    members: Tensor
    proved: Tensor
    weights: Tensor
    origin: Tensor
    moved: Tensor

    @classmethod
    def empty(cls, clients: int, rounds: int, model: Tensor) -> ClientHistory:
        """Return the history before the first round."""
        steps = torch.zeros(clients, rounds, dtype=torch.float64)
        return cls(
            model.new_zeros(()).expand(clients, len(model)),  # expanded, so that it takes no memory
            steps,
            steps,
            steps.new_zeros(rounds),
            steps.new_zeros(rounds),
            torch.zeros(clients, rounds, dtype=torch.bool),
            steps.new_zeros(rounds),
            torch.ones(clients, dtype=torch.bool),
            steps.new_zeros(clients),
            steps.new_zeros(clients),
            model,
            torch.zeros_like(model),
        )

    @classmethod
    def read(cls, state: State) -> ClientHistory:
        """Return the history in a server's state; all parts but the `LONG` ones are moved to the host.

        >>> ClientHistory.read({"evidence.sums": torch.zeros(2, 5)})
        Traceback (most recent call last):
        trilemma.base.errors.UserError: the state of this server was kept by another version, without ...
        """
        if missing := [name for name in cls.__dataclass_fields__ if PREFIX + name not in state]:
            raise UserError(
                f"the state of this server was kept by another version, without {PREFIX + missing[0]}: let "
                "that version finish the run, or begin it anew"
            )
        found = {name: state[PREFIX + name] for name in cls.__dataclass_fields__}
        return cls(**{name: part if name in LONG else part.cpu() for name, part in found.items()})

    def state(self) -> dict[str, Tensor]:
        """Return the history as part of a server's state."""
        return {PREFIX + name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def staying(self) -> Places:
        """The rows of the clients that are still in."""
        return np.flatnonzero(self.members.cpu().numpy()).astype(np.int64)

    @cached_property
    def liars_proved(self) -> int:
        """How many liars are proved: for a pair that was set aside, one."""
        return int(self.proved.cpu().numpy().sum())

    def reaching(self, places: int) -> ClientHistory:
        """Return the history with at least `places` rows.

        >>> ClientHistory.empty(2, 3, torch.zeros(5)).reaching(4).sums.shape
        torch.Size([4, 5])
        """
        missing = places - len(self.members)
        if missing <= 0:
            return self

        def longer(rows: Tensor, value: float = 0.0) -> Tensor:
            return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])

        grown = {name: longer(getattr(self, name)) for name in PER_CLIENT}
        return replace(self, **grown, members=longer(self.members, True))

    def expelling(self, found: Sequence[Expulsion]) -> ClientHistory:
        """Return the history after these expulsions.

        >>> pair = [Expulsion(place, "one of a pair") for place in (1, 2)]
        >>> ClientHistory.empty(3, 1, torch.zeros(5)).expelling(pair).proved.sum()  # at least one lied
        tensor(1., dtype=torch.float64)
        """
        if not found:
            return self
        members, proved_ = self.members.clone(), self.proved.clone()
        for one in found:
            members[one.client], proved_[one.client] = False, proved([one])
        return replace(self, members=members, proved=proved_)

    def last_before(self, round_: int) -> int:
        """Return the last round before `round_` that was held; −1 if there was none."""
        held = np.flatnonzero(self.sharing[:, :round_].numpy().any(axis=0))
        return int(held[-1]) if len(held) else -1

    def law(self, coefficients: Tensor, rows: Places, neighbours: int | None = None) -> Law:
        """Return the law of Σ_s c_is u_i(s) for clients i in `rows`, with c = `coefficients` (n, T).

        `neighbours` is with how many others each client shares secrets; None: with all.
        """
        so_far, dim = slice(self.last_before(len(self.own)) + 1), self.sums.shape[1]
        parts = (self.own, self.shared, self.sharing, coefficients, self.clips)
        own, shared, sharing, c, clips = (part.cpu().numpy()[..., so_far] for part in parts)
        members = sharing.sum(axis=0)
        if neighbours is None or neighbours >= members.max(initial=0) - 1:
            return Law.of(shared, c[rows], own + members * shared, clips, dim)
        return Law.on_graphs(own, shared, sharing, neighbours, c, clips, dim).select(rows)


def added(sums: Tensor, x: Tensor, rows: Tensor | slice, step: float, spare: Spare) -> Tensor:
    """Return `sums` (n, d) with step · x (k, d) added to `rows`; a slice stands for all n rows.

    The result lies in `spare` memory. If the messages lie in a file, they are too long for memory, and the
    result is written to another history beside it.
    """
    if not lies_in_a_file(x):
        return _added(sums, x, rows, step, spare.like(sums))
    after, width = beside(x, sums.shape), max(1, TOGETHER // len(sums))
    for start in range(0, sums.shape[1], width):
        columns = slice(start, start + width)
        _added(sums[:, columns], x[:, columns], rows, step, after[:, columns])
    return after


def _added(sums: Tensor, x: Tensor, rows: Tensor | slice, step: float, there: Tensor) -> Tensor:
    if isinstance(rows, slice):
        return torch.add(sums, x, alpha=step, out=there)
    there.copy_(sums)
    return there.index_add_(0, rows.to(x.device), x.to(sums.dtype), alpha=step)
