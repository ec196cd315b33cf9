"""What a defended server has on its clients, as part of its state.

A client's row is its place in the federation, for good: who joins a run later gets a row then, and nobody's
row is another's. Noise is known by the round: in a federation it may be another after a client came or went.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trilemma.errors import UserError
from trilemma.learning.evidence.conviction import Expulsion, proved
from trilemma.learning.evidence.spare import Spare
from trilemma.learning.protocol import State
from trilemma.learning.trace import Law, Places
from trilemma.mapped import beside, lies_in_a_file

PREFIX = "evidence."

TOGETHER = 1 << 22
"""Numbers of sums in files that are worked on together."""

ORIGIN = PREFIX + "origin"
"""Where in a server's state the model is that is moved."""


LONG = ("sums", "origin", "moved")
"""Parts with a number for every coordinate."""

PER_CLIENT = ("sums", "coefficients", "carried", "proved", "taken")
"""Parts with a row for every client, which is zero before anything is known of it."""


@dataclass(frozen=True)
class File:
    """What the server has on its clients, out of its state.

    `sums` (n, d); `coefficients` c and `carried` p (n, T); `spreads` R_s², `shared` σ_cor² and `clips` C(s)
    (T,); `members` (n,) who is still in; `proved` (n,) how many liars each one's expulsion proves: 1, or 0.5
    for either of a pair; `taken` (n,) each one's weight in the model's steps; `origin` and `moved` (d,).
    """

    sums: Tensor
    coefficients: Tensor
    carried: Tensor
    spreads: Tensor
    shared: Tensor
    clips: Tensor
    members: Tensor
    proved: Tensor
    taken: Tensor
    origin: Tensor
    moved: Tensor

    @classmethod
    def empty(cls, clients: int, rounds: int, model: Tensor) -> File:
        """Return what is known before the first round."""
        steps = torch.zeros(clients, rounds, dtype=torch.float64)
        return cls(
            model.new_zeros(()).expand(clients, len(model)),  # takes no room: clients start from it too
            steps,
            steps,
            steps.new_zeros(rounds),
            steps.new_zeros(rounds),
            steps.new_zeros(rounds),
            torch.ones(clients, dtype=torch.bool),
            steps.new_zeros(clients),
            steps.new_zeros(clients),
            model,
            torch.zeros_like(model),
        )

    @classmethod
    def read(cls, state: State) -> File:
        """Return the file out of a server's state; what is small lies on the host, where it is looked at.

        >>> File.read({"evidence.sums": torch.zeros(2, 5)})
        Traceback (most recent call last):
        trilemma.errors.UserError: the state of this server was kept by another version, without ...
        """
        if missing := [name for name in cls.__dataclass_fields__ if PREFIX + name not in state]:
            raise UserError(
                f"the state of this server was kept by another version, without {PREFIX + missing[0]}: let "
                "that version finish the run, or begin it anew"
            )
        found = {name: state[PREFIX + name] for name in cls.__dataclass_fields__}
        return cls(**{name: part if name in LONG else part.cpu() for name, part in found.items()})

    def state(self) -> dict[str, Tensor]:
        """Return the file as part of a server's state."""
        return {PREFIX + name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def staying(self) -> Places:
        """Who is still in, as places."""
        return np.flatnonzero(self.members.cpu().numpy()).astype(np.int64)

    @cached_property
    def liars_proved(self) -> int:
        """How many liars are proved for certain."""
        return int(self.proved.cpu().numpy().sum())

    def reaching(self, places: int) -> File:
        """Return the file with a row for each of so many places at least.

        >>> File.empty(2, 3, torch.zeros(5)).reaching(4).sums.shape
        torch.Size([4, 5])
        """
        missing = places - len(self.members)
        if missing <= 0:
            return self

        def longer(rows: Tensor, value: float = 0.0) -> Tensor:
            return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])

        grown = {name: longer(getattr(self, name)) for name in PER_CLIENT}
        return replace(self, **grown, members=longer(self.members, True))

    def expelling(self, found: Sequence[Expulsion]) -> File:
        """Return the file when these clients are out.

        >>> pair = [Expulsion(place, "one of a pair") for place in (1, 2)]
        >>> File.empty(3, 1, torch.zeros(5)).expelling(pair).proved.sum()  # at least one of the two lied
        tensor(1., dtype=torch.float64)
        """
        if not found:
            return self
        members, proved_ = self.members.clone(), self.proved.clone()
        for one in found:
            members[one.client], proved_[one.client] = False, proved([one])
        return replace(self, members=members, proved=proved_)

    def last_before(self, round_: int) -> int:
        """Return the last round before another in which anybody was heard; −1 where there was none."""
        held = np.flatnonzero(self.spreads[:round_].numpy())
        return int(held[-1]) if len(held) else -1

    def law(self, coefficients: Tensor, rows: Places) -> Law:
        """Return the law of combinations of releases with these rows of `coefficients` (n, T)."""
        parts = (self.shared, coefficients, self.spreads, self.clips)
        so_far = slice(self.last_before(len(self.spreads)) + 1)
        shared, c, spreads, clips = (part.cpu().numpy()[..., so_far] for part in parts)
        return Law.of(shared, c[rows], spreads, clips, self.sums.shape[1])


def added(sums: Tensor, x: Tensor, rows: Tensor | slice, step: float, spare: Spare) -> Tensor:
    """Return the sums (n, d) with step · x, of messages (k, d), added to these rows; a slice is all of them.

    They lie in what is `spare`; where messages lie in a file there is no room in memory, and they are in one
    beside it.
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
