"""A candidates: liars evaluate many lies of a round together, in the Gram matrix of the round's vectors.

The basis consists of the defence's vectors (all clients' sums, the messages, the model's move so far), the
directions in which liars push, and the direction in which the truth would move the model. Its Gram matrix is
measured once. A lie is what is added to the liars' messages, as coefficients in this basis: a few rows of
some two hundred numbers, whatever d is. The defence evaluates all candidates at once, on the device of the
messages.

To turn noise, the host needs the inner products of the few rows that lies mix. These are measured first, so
that the lies are ready when a GPU has measured the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trilemma.attacks.span import inner_products
from trilemma.base.transfers import to_the_device, to_the_host
from trilemma_lab.adversary.changed import Places
from trilemma_lab.adversary.informed import Defence
from trilemma_lab.adversary.turning import Array, TurnedRows

TOGETHER = 1 << 25
"""How many numbers the Gram matrices of candidates evaluated together may have."""


@dataclass(frozen=True)
class Lies:
    """B lies.

    `which` (B,) is the direction of each, `strength` (B,) its strength, and `changes` (B, r, u) what it adds
    to the messages of the r liars who lie in this round: coefficients of u basis vectors (`Candidates.used`).
    """

    which: Places
    strength: Array
    changes: Array

    def __len__(self) -> int:
        return len(self.which)

    def only(self, places: Places) -> Lies:
        """Return the lies at these places."""
        return Lies(self.which[places], self.strength[places], self.changes[places])

    @classmethod
    def joined(cls, some: Sequence[Lies]) -> Lies:
        """Return several sets of lies as one."""
        return cls(
            np.concatenate([one.which for one in some]),
            np.concatenate([one.strength for one in some]),
            np.concatenate([one.changes for one in some]),
        )


@dataclass(frozen=True)
class JudgedLies:
    """The result of B lies: `harm` (B,), −∞ if somebody is expelled; `corrected` (B,), what is set right."""

    harm: Array
    corrected: Array

    def allowed(self, unseen: float) -> Array:
        """Return the harm (B,), and −∞ for lies of which more than `unseen` is set right."""
        return np.where(self.corrected <= unseen, self.harm, -math.inf)


class Candidates:
    """One round, in which liars try out changes of their messages.

    `liars` are their places among all clients, `lying` (f,) each liar's factor of the shift (0: it does not
    lie), `directions` (q, d) the unit vectors along which lies push. Harm is how far the model moves against
    `truth` (d,). `noise` is the attack's option of that name.

    With `own_ways` each of the r who lie pushes another way: `directions` are (q·r, d), first all of the
    first way, and need not be unit vectors; noise is then as the protocol wants it.
    """

    def __init__(
        self,
        defence: Defence,
        liars: tuple[int, ...],
        lying: Array,
        directions: Tensor,
        truth: Tensor,
        noise: str,
        own_ways: bool = False,
    ) -> None:
        self.defence, self.noise, self.directions, self.own_ways = defence, noise, directions, own_ways
        senders = np.asarray(defence.senders)
        rows = {int(client): row for row, client in enumerate(senders)}
        self.places = np.array([rows[i] for i in liars])  # the liars' rows among the senders
        self.active, self.lying = self.places[lying > 0], lying[lying > 0]
        # The truth moves the model by step × truth; harm is counted against that.
        downhill = math.copysign(1.0, defence.step) * truth
        downhill = downhill / torch.linalg.vector_norm(downhill).clamp(min=1e-30)
        self.beside = torch.cat([directions, downhill[None]])
        self.k, self.basis = len(senders), defence.size
        self.n = self.basis - self.k - 1
        # Rows of the basis that lies mix, and how far they move per change of the messages. Turned noise is
        # turned either in the messages or in the sums; without turning, both give the same lie.
        self.mixable = [(self.n + self.active, 1.0)]
        if self.n and noise != "protocol":
            self.mixable.append((senders[self.active], defence.step))
        ways = self.basis + np.arange(len(directions))
        self.used = np.unique(np.concatenate([*(rows for rows, _ in self.mixable), ways]))
        if noise != "protocol":
            mixed = defence.rows(self.used[self.used < self.basis])
            self._among_used = to_the_host(inner_products(mixed, directions.to(mixed.device)))
        self.measured: Tensor = defence.gram(self.beside)  # on the device

    def lies(self, which: int, strengths: Sequence[float] | Array) -> Lies:
        """Return lies of these strengths along a direction; for turned noise both kinds, if possible."""
        tried, along = np.asarray(strengths, dtype=float), self.along(which)
        if self.own_ways:
            r = len(self.active)
            changes = np.zeros((len(tried), r, len(self.used)))
            own = np.searchsorted(self.used, along + np.arange(r))
            changes[:, np.arange(r), own] = tried[:, None] * self.lying
            return Lies(np.full(len(tried), which), tried, changes)
        found = []
        for kind, (rows, scale) in enumerate(self.mixable):
            places, mixes = self._turnable(which, kind).mixed(scale * tried[:, None] * self.lying, self.noise)
            mixes[:, :, :-1] -= np.eye(len(rows))
            changes = np.zeros((len(places), len(rows), len(self.used)))
            changes[:, :, np.searchsorted(self.used, [*rows, along])] = mixes / scale
            found.append(Lies(np.full(len(places), which), tried[places], changes))
        return found[0] if len(found) == 1 else Lies.joined(found)

    def furthest(self, which: int) -> list[float]:
        """Return the largest strengths that turned noise allows; empty if noise is not turned."""
        if self.noise == "protocol":
            return []
        scales = [scale for _, scale in self.mixable]
        return [self._turnable(which, kind).furthest(by * self.lying) for kind, by in enumerate(scales)]

    def _turnable(self, which: int, kind: int) -> TurnedRows:
        """Return the rows of the basis that a kind of lie turns towards a direction."""
        if self.noise == "protocol":  # nothing is turned, so the rows' inner products are not needed
            return TurnedRows(np.zeros((0, 0)), np.zeros(0))
        if (which, kind) not in self._turnables:
            rows = np.searchsorted(self.used, self.mixable[kind][0])
            inner = self._inner[np.ix_(rows, rows)]
            before = self._inner[rows, np.searchsorted(self.used, self.along(which))]
            self._turnables[which, kind] = TurnedRows(inner, before)
        return self._turnables[which, kind]

    @cached_property
    def _turnables(self) -> dict[tuple[int, int], TurnedRows]:
        return {}

    @cached_property
    def _inner(self) -> Array:
        """The Gram matrix of the vectors that lies use (u, u), on the host."""
        found: Array = self._among_used().numpy()
        return found

    @property
    def ways(self) -> int:
        """How many ways there are to push."""
        return len(self.directions) // (len(self.active) if self.own_ways else 1)

    def along(self, which: int) -> int:
        """Return the place of a direction in the basis; of the first liar's, if liars have their own."""
        return self.basis + which * (len(self.active) if self.own_ways else 1)

    @property
    def honest(self) -> Lies:
        """The one lie that changes nothing."""
        return Lies(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, len(self.active), len(self.used))))

    def judged(self, lies: Lies) -> JudgedLies:
        """Return harm and correction of every lie."""
        judged, count = [np.zeros((2, 0))], max(1, TOGETHER // (self.n + self.k) ** 2)
        for start in range(0, len(lies), count):
            changes = self.in_the_basis(lies.changes[start : start + count])
            found = self.defence.outcomes(self.measured, self.active, changes, self.beside)
            judged.append(np.stack([found.harm.numpy(), found.corrected.numpy()]))
        return JudgedLies(*np.concatenate(judged, 1))

    def in_the_basis(self, changes: Array) -> Tensor:
        """Return changes (B, r, u) as coefficients in the whole basis (B, r, p), on the messages' device."""
        some = to_the_device(changes, self.measured.device)
        whole = some.new_zeros(*some.shape[:2], len(self.measured))
        return whole.index_copy_(2, self._used_there, some)

    @cached_property
    def _used_there(self) -> Tensor:
        return to_the_device(self.used, self.measured.device)

    def sent(self, lies: Lies, place: int) -> Tensor:
        """Return what all f liars add to their messages (f, d) for the lie at `place`."""
        mix = np.zeros((len(self.places), len(self.used)))
        mix[np.isin(self.places, self.active)] = lies.changes[place]
        needed = mix.any(axis=0)
        mix, used = mix[:, needed], self.used[needed]
        rows, ways = used[used < self.basis], used[used >= self.basis] - self.basis
        along = self.directions if len(ways) == len(self.directions) else self.directions[ways.tolist()]
        vectors = torch.cat([self.defence.rows(rows).to(self.directions), along])
        return to_the_device(mix, vectors.device).to(vectors) @ vectors
