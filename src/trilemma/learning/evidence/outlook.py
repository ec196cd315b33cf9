"""What becomes of messages before they are sent: the defended server, asked by liars who know its state.

A server is a pure function, so whoever knows its state and the round's messages can run it beforehand:
`Rehearsal` is that, as the target of a searched attack. `Outlook` is the same in the Gram matrix of the sums,
for searches that try many lies a round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trilemma import aggregation
from trilemma.keys import Key
from trilemma.learning.evidence.court import Court
from trilemma.learning.evidence.file import File
from trilemma.learning.messages import Messages
from trilemma.learning.protocol import Algorithm, State
from trilemma.learning.trace import Array, Law, Places


@dataclass(frozen=True)
class Outcome:
    """What a rehearsed round makes of messages: the aggregate that would have moved the model as it did."""

    value: Tensor


@dataclass(frozen=True)
class Rehearsal:
    """A defended server in one round, as a function of the messages alone (`attacks.types.Target`)."""

    algorithm: Algorithm
    state: State
    round: int
    senders: tuple[int, ...]

    def __call__(self, vectors: Tensor, /, *, key: Key | None = None) -> Outcome:
        """Run the server on `vectors` (k, d) without anybody noticing."""
        trace = self.algorithm.trace
        assert trace is not None
        messages = Messages(vectors, senders=self.senders)
        after = self.algorithm.server(messages, self.state, self.round, key or Key(0))
        move = (after.broadcast[trace.model] - self.state[trace.model]) / trace.step(self.round)
        return Outcome(move + self.state[trace.model] if trace.around else move)


@dataclass(frozen=True)
class Foreseen:
    """What becomes of a round: how many are expelled, the model's move (p,) in a basis, what is corrected.

    `awaited` are those who are not expelled now, but would be if the sums were looked at.
    """

    expelled: int
    move: Array
    corrected: float
    awaited: int = 0


@dataclass(frozen=True)
class Outlook:
    """A defended server in a round in which everybody sent what it computed, ready for changes.

    All that a lie does is seen in the Gram matrix of a basis of vectors, measured once: everybody's sums,
    this round's messages, the model's move before it, and whatever the liars put beside them. A candidate is
    then a few matrices of n rows, whatever d is.

    Attributes:
        vectors: The basis (n + k + 1, d): sums of all n, messages of the k senders, the move so far.
        senders: Whose messages they are.
        step: What the round's aggregate is multiplied by.
        due: Whether the sums are looked at in this round.
    """

    vectors: Tensor
    senders: Places
    step: float
    due: bool
    court: Court
    file: File

    @classmethod
    def of(
        cls, court: Court, state: State, messages: Tensor, senders: tuple[int, ...], round_: int
    ) -> Outlook:
        """Return the outlook on a round in which `senders` send `messages` (k, d)."""
        before, trace = File.read(state), court.trace
        x = trace.vectors(messages, state[trace.model])
        file = court.heard(before, x, senders, round_)
        due = court.due(before, round_)  # between looks the model goes on from where it is
        moved = before.moved if due else state[trace.model] - before.origin
        vectors = torch.cat([file.sums, x.to(file.sums.dtype), moved[None]])
        return cls(vectors, np.array(senders, dtype=np.int64), trace.step(round_), due, court, file)

    @cached_property
    def laws(self) -> tuple[Law, Law]:
        """The laws of sums and messages: the same for every lie."""
        file, sent = self.file, torch.from_numpy(self.senders)
        return self.court.law(file).select(file.staying), file.law(file.carried[sent])

    def gram(self, beside: Tensor) -> Array:
        """Return the Gram matrix of the basis with the rows `beside` (q, d) after it."""
        found: Array = aggregation.gram(torch.cat([self.vectors, beside.to(self.vectors)])).numpy()
        return found

    def outcome(self, gram: Array, changes: Array) -> Foreseen:
        """Return who would be expelled, and where the model would be moved.

        `gram` (p, p) is the basis', `changes` (k, p) what is added to every sender's message, in it. Where
        somebody is expelled, nothing more is worked out.
        """
        p, k = len(gram), len(self.senders)
        n = len(self.vectors) - k - 1
        lying = np.flatnonzero(changes.any(axis=1))  # few: no product of all rows is needed
        sums = _changed(gram, slice(0, n), self.senders[lying], self.step * changes[lying])
        fresh = _changed(gram, slice(n, n + k), lying, changes[lying])
        court, file = self.court, self.file
        whole = court.sums(file, sums, self.laws[0])
        sent = court.messages(file, fresh, self.senders, self.laws[1])
        convicted = court.convict(whole if self.due else None, sent, file)
        move = np.eye(1, p, n + k)[0]
        if convicted:
            return Foreseen(len(convicted), move, math.inf)
        awaited = 0 if self.due else len(court.convict(whole, sent, file))
        weights = court.weights(fresh, file)

        def combined(y: Array) -> Array:
            """Return y @ messages."""
            return np.pad(y, (n, p - n - k)) + y @ changes

        def beside(vector: Array) -> Array:
            """Return the messages' inner products with a combination of the basis."""
            found: Array = gram[n : n + k] @ vector + changes @ (gram @ vector)
            return found

        mean = combined(weights)
        now = combined(court.corrected(sent, lambda: beside(mean), file.carried, file).mix)
        move = move + self.step * (mean + now)
        set_right = self.step * now
        if not self.due:
            return Foreseen(0, move, _length(gram, set_right), awaited)
        members = np.eye(n, p)
        members[self.senders] += self.step * changes
        members = members[whole.rows]

        def parts() -> Array:
            taken = file.taken.clone()
            taken[torch.from_numpy(self.senders)] += torch.from_numpy(weights).to(taken)
            return court.parts(replace(file, taken=taken))

        right = court.corrected(whole, lambda: members @ (gram @ move), file.coefficients, file, parts)
        after = right.kept * move + right.mix @ members
        return Foreseen(0, after, _length(gram, set_right) + _length(gram, after - move))


def _length(gram: Array, vector: Array) -> float:
    """Return the length of a combination of the basis."""
    return math.sqrt(max(float(vector @ gram @ vector), 0.0))


def _changed(gram: Array, rows: slice, which: Places, changes: Array) -> Array:
    """Return the Gram matrix of some rows of the basis, of which `which` are changed by `changes` (r, p)."""
    found = gram[rows, rows].copy()
    across = changes @ gram
    found[which] += across[:, rows]
    found[:, which] += across[:, rows].T
    found[np.ix_(which, which)] += across @ changes.T
    return found
