"""What becomes of messages before they are sent: the defended server, asked by liars who know its state.

A server is a pure function, so whoever knows its state and the round's messages can run it beforehand:
`Rehearsal` is that, as the target of a searched attack. `Outlook` is the same in the Gram matrix of the sums,
for searches that try many lies a round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trilemma.keys import Key
from trilemma.learning.evidence.guard import Court, File
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
class Outlook:
    """A defended server after a round in which everybody sent what it computed, ready for changes.

    Attributes:
        sums: Everybody's sums (n, d).
        moved: How far the model would have been moved (d,), were the rule the mean.
        step: What the round's aggregate is multiplied by.
        rows: Who of the n is still a member, as places; `law` is theirs.
    """

    sums: Tensor
    moved: Tensor
    step: float
    rows: Places
    court: Court
    file: File
    law: Law

    @classmethod
    def of(
        cls, court: Court, state: State, messages: Tensor, senders: tuple[int, ...], round_: int
    ) -> Outlook:
        """Return the outlook on a round in which `senders` send `messages` (k, d)."""
        before, trace = File.read(state), court.trace
        x = trace.vectors(messages, state[trace.model])
        file = court.heard(before, x, senders, round_)
        moved = file.moved + trace.step(round_) * x.mean(0)
        return cls(
            file.sums,
            moved,
            trace.step(round_),
            file.staying,
            court,
            file,
            court.law(file).select(file.staying),
        )

    def judge(self, gram: Array, moved: Array) -> tuple[int, Array]:
        """Return how many members would be expelled, and the correction's coefficients (n,).

        `gram` (n, n) is the Gram matrix of changed sums, `moved` (n,) their products with the changed move.
        """
        answer, inside = np.zeros(len(gram)), gram[np.ix_(self.rows, self.rows)]
        convicted = self.court.convict(inside, self.law, self.file)
        if not convicted:
            answer[self.rows] = self.court.corrected(inside, moved[self.rows], self.law, self.file)
        return len(convicted), answer
