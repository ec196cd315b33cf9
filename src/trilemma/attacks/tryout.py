"""A round in which liars try out their lies: all of them together, in the Gram matrix of the round's vectors.

The basis is the defence's (everybody's sums, the messages, the model's move so far), then the directions in
which liars push, then the way the truth would move the model. Its Gram matrix is measured once. A lie is what
it adds to the liars' messages, in this basis: a few rows of some two hundred numbers, whatever d is. What
becomes of it is the defence's to say, of all candidates at once and on the device where messages lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trilemma.attacks.changed import Places
from trilemma.attacks.turning import Array, Rows
from trilemma.attacks.types import Defence

TOGETHER = 1 << 25
"""Numbers in the Gram matrices of candidates that are looked at together."""


@dataclass(frozen=True)
class Lies:
    """B lies: where they push, how hard, and what they add to the messages of liars who lie (B, r, u).

    What is added is a combination of u vectors of the basis, the same ones for all lies (`Tryout.used`).
    """

    which: Places
    strength: Array
    changes: Array

    def __len__(self) -> int:
        return len(self.which)

    def only(self, places: Places) -> Lies:
        """Return some of them."""
        return Lies(self.which[places], self.strength[places], self.changes[places])

    @classmethod
    def joined(cls, some: Sequence[Lies]) -> Lies:
        """Return all of them as one."""
        return cls(
            np.concatenate([one.which for one in some]),
            np.concatenate([one.strength for one in some]),
            np.concatenate([one.changes for one in some]),
        )


@dataclass(frozen=True)
class Judged:
    """What becomes of B lies: the harm (B,), −∞ where somebody is expelled, and what is set right (B,)."""

    harm: Array
    corrected: Array

    def allowed(self, unseen: float) -> Array:
        """Return the harm (B,), −∞ also where more than `unseen` is set right."""
        return np.where(self.corrected <= unseen, self.harm, -math.inf)


class Tryout:
    """A round, and what becomes of it when liars change their messages.

    `liars` are their places among all clients, `lying` (f,) the factor of the shift for each of them,
    `directions` (q, d), of length 1, where lies push; harm is how far the model lands against `truth` (d,).
    `noise` is as in the attack's options.
    """

    def __init__(
        self,
        defence: Defence,
        liars: tuple[int, ...],
        lying: Array,
        directions: Tensor,
        truth: Tensor,
        noise: str,
    ) -> None:
        self.defence, self.noise, self.directions = defence, noise, directions
        senders = np.asarray(defence.senders)
        rows = {int(client): row for row, client in enumerate(senders)}
        self.places = np.array([rows[i] for i in liars])  # of all liars among the senders
        self.active, self.lying = self.places[lying > 0], lying[lying > 0]
        # The truth moves the model by step × truth; harm is counted against that.
        downhill = math.copysign(1.0, defence.step) * truth
        downhill = downhill / torch.linalg.vector_norm(downhill).clamp(min=1e-30)
        self.beside = torch.cat([directions, downhill[None]])
        self.measured: Tensor = defence.gram(self.beside)  # who reads it on the host waits for it
        self.k, self.basis = len(senders), len(self.measured) - len(self.beside)
        self.n = self.basis - self.k - 1
        # What lies mix: rows of the basis, and how far a change of messages moves them. Noise is turned in
        # messages or in their sums; where it stays as it is, one comes to the same as the other.
        self.mixable = [(self.n + self.active, 1.0)]
        if self.n and noise != "protocol":
            self.mixable.append((senders[self.active], defence.step))
        ways = [self.along(which) for which in range(len(directions))]
        self.used = np.unique(np.concatenate([*(rows for rows, _ in self.mixable), ways]))

    def lies(self, which: int, strengths: Sequence[float] | Array) -> Lies:
        """Return lies of these strengths along a direction; of turned noise two kinds, where possible."""
        tried, along = np.asarray(strengths, dtype=float), self.along(which)
        found = []
        for kind, (rows, scale) in enumerate(self.mixable):
            places, mixes = self._turnable(which, kind).mixed(scale * tried[:, None] * self.lying, self.noise)
            mixes[:, :, :-1] -= np.eye(len(rows))
            changes = np.zeros((len(places), len(rows), len(self.used)))
            changes[:, :, np.searchsorted(self.used, [*rows, along])] = mixes / scale
            found.append(Lies(np.full(len(places), which), tried[places], changes))
        return found[0] if len(found) == 1 else Lies.joined(found)

    def furthest(self, which: int) -> list[float]:
        """Return the largest strengths that turned noise allows; none where noise is not turned."""
        if self.noise == "protocol":
            return []
        scales = [scale for _, scale in self.mixable]
        return [self._turnable(which, kind).furthest(by * self.lying) for kind, by in enumerate(scales)]

    def _turnable(self, which: int, kind: int) -> Rows:
        """Return the rows of the basis that lies of a kind mix, beside a direction."""
        if self.noise == "protocol":  # whatever they are, they stay it
            return Rows(np.zeros((0, 0)), np.zeros(0))
        if (which, kind) not in self._turnables:
            rows = self.mixable[kind][0]
            inner, before = self.gram[np.ix_(rows, rows)], self.gram[rows, self.along(which)]
            self._turnables[which, kind] = Rows(inner, before)
        return self._turnables[which, kind]

    @cached_property
    def _turnables(self) -> dict[tuple[int, int], Rows]:
        return {}

    @cached_property
    def gram(self) -> Array:
        """The Gram matrix on the host."""
        found: Array = self.measured.cpu().numpy()
        return found

    def along(self, which: int) -> int:
        """Return the place of a direction in the basis."""
        return len(self.measured) - 1 - len(self.directions) + which

    @property
    def honest(self) -> Lies:
        """No lie at all."""
        return Lies(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, len(self.active), len(self.used))))

    def judged(self, lies: Lies) -> Judged:
        """Return what becomes of every one of them."""
        there, judged = self.measured, list[Tensor]()
        count = max(1, TOGETHER // (self.n + self.k) ** 2)
        for start in range(0, len(lies), count):
            some = self.in_the_basis(lies.changes[start : start + count])
            found = self.defence.outcomes(there, self.active, some, self.beside)
            harm = torch.where(found.expelled, -math.inf, -(found.move @ there[:, -1]))
            judged.append(torch.stack([harm, found.corrected]))
        return Judged(*torch.cat([there.new_zeros(2, 0), *judged], 1).cpu().numpy())

    def in_the_basis(self, changes: Array) -> Tensor:
        """Return changes (B, r, u) where messages lie, in the whole basis (B, r, p)."""
        some = torch.from_numpy(changes).to(self.measured.device)
        whole = some.new_zeros(*some.shape[:2], len(self.measured))
        return whole.index_copy_(2, self._used_there, some)

    @cached_property
    def _used_there(self) -> Tensor:
        return torch.from_numpy(self.used).to(self.measured.device)

    def sent(self, lies: Lies, place: int) -> Tensor:
        """Return what all liars add to their messages (f, d) by one of the lies."""
        mix = np.zeros((len(self.places), len(self.used)))
        mix[np.isin(self.places, self.active)] = lies.changes[place]
        there = mix.any(axis=0)
        mix, used = mix[:, there], self.used[there]
        rows, ways = used[used < self.basis], used[used >= self.basis] - self.basis
        along = self.directions if len(ways) == len(self.directions) else self.directions[ways.tolist()]
        used_rows = torch.cat([self.defence.rows(rows).to(self.directions), along])
        return torch.from_numpy(mix).to(self.directions) @ used_rows
