"""What a defended server would do with messages before they are sent: the target of a searched attack.

A server is a pure function, so liars who know its state and the round's messages can run it beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trilemma.base.keys import Key
from trilemma.learning.messages import Messages
from trilemma.learning.protocol import Algorithm, State


@dataclass(frozen=True)
class Rehearsed:
    """The result of a rehearsed round: the aggregate (d,) that moves the model as the server did."""

    value: Tensor


@dataclass(frozen=True)
class Rehearsal:
    """A defended server in one round, as a function of the messages only (see `attacks.types.Target`)."""

    algorithm: Algorithm
    state: State
    round: int
    senders: tuple[int, ...]

    def __call__(self, vectors: Tensor, /, *, key: Key | None = None) -> Rehearsed:
        """Run the server on `vectors` (k, d); its state is not changed."""
        trace = self.algorithm.trace
        assert trace is not None
        messages = Messages(vectors, senders=self.senders)
        after = self.algorithm.server(messages, self.state, self.round, key or Key(0))
        move = (after.broadcast[trace.model] - self.state[trace.model]) / trace.step(self.round)
        return Rehearsed(move + self.state[trace.model] if trace.around else move)
