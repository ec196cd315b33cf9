"""Admission: which replies enter a round, and why the others do not.

A pure function from what arrived to what is accepted. A reply that is malformed, late, of another round, of
the wrong shape or type, too long, or not finite, and one that contradicts an earlier one, is rejected with a
reason; its sender counts as Byzantine for the round and the round goes on. Nothing a client says about itself
is believed: who it is comes from the node it is connected by, and no metric of a client's enters a round.
What a server broadcasts must have its declared shape, and be in bounds, before a client computes with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.disk_backed import DiskBacked
from trilemma.federation.protocol.reasons import Reason, Refused, shortened
from trilemma.federation.protocol.transport import Reply
from trilemma.learning import MessageLayout, Messages
from trilemma.learning.messages import Asked
from trilemma.learning.protocol import State

HEADROOM = 4096
"""Bytes a header may take beside the message."""

TOGETHER = 1 << 22
"""Numbers of a message that are looked at together."""


@dataclass(frozen=True)
class Expected:
    """What an admissible reply looks like.

    `layout` is what the algorithm declares; `clients` maps nodes that were asked to the clients they are;
    `answer` is the kind of reply; `remembered` is what was kept of each client's last message, `broadcast`
    what began the round. Messages that are long lie in files.
    """

    run: str
    epoch: int
    round: int
    layout: MessageLayout
    clients: Mapping[int, int] = field(default_factory=dict)
    answer: type[kinds.Answer] = kinds.Answer
    remembered: Mapping[int, wire.Tensors] = field(default_factory=dict)
    broadcast: wire.Tensors = field(default_factory=dict)
    disk_backed: DiskBacked | None = None


@dataclass(frozen=True)
class Rejection:
    """A reply that was not accepted. `client` is None where the node is nobody in this epoch.

    `unreached`: nobody said anything, the carrier did not get through.
    """

    node: int
    client: int | None
    reason: str
    unreached: bool = False

    @classmethod
    def of(cls, node: int, client: int | None, reason: object, unreached: bool = False) -> Rejection:
        """Reject for a reason that may quote the reply: little of it is kept, it goes into every record."""
        return cls(node, client, shortened(str(reason)), unreached)


@dataclass(frozen=True)
class Admitted:
    """The outcome so far of a round: messages by client, every rejection, and every client's first block.

    `remembered` is what is needed to understand each client's next message.
    """

    messages: Mapping[int, Messages] = field(default_factory=dict)
    rejected: tuple[Rejection, ...] = ()
    heard: Mapping[int, Reply] = field(default_factory=dict)
    remembered: Mapping[int, wire.Tensors] = field(default_factory=dict)

    @property
    def vectors(self) -> dict[int, Tensor]:
        """What the rule aggregates, by client."""
        return {client: message.vectors[0] for client, message in self.messages.items()}

    def stack(self, rows: Sequence[int], dim: int, disk_backed: DiskBacked | None = None) -> Tensor:
        """Return one row per client of `rows`; a client without an accepted vector is a row of NaN.

        That is how a rule is told about absence: rows that are not finite count against f.
        """
        if not rows:
            return torch.empty(0, dim)
        if disk_backed is not None:
            return disk_backed.stack(self.vectors, rows, dim)
        absent, vectors = torch.full((dim,), torch.nan), self.vectors
        return torch.stack([vectors.get(client, absent) for client in rows])


def admit(expected: Expected, replies: Iterable[Reply], before: Admitted | None = None) -> Admitted:
    """Decide about every reply, in the order of arrival; `before` is the outcome of the round so far.

    A client speaks once in a round. Asked twice, an honest one gives the same bytes twice, which is no second
    reply; whoever says two things is not honest, and neither of them counts.

    >>> from trilemma.learning import Part
    >>> layout = MessageLayout((Part("momentum", (2,)),), ("momentum",))
    >>> expected = Expected("run", epoch=0, round=4, layout=layout, clients={11: 0, 12: 1})
    >>> good = wire.dumps(kinds.Answer(client=0, run="run", epoch=0, round=4), {"vector": torch.ones(2)})
    >>> old = wire.dumps(kinds.Answer(client=1, run="run", epoch=0, round=3), {"vector": torch.ones(2)})
    >>> outcome = admit(expected, [Reply(11, good), Reply(12, old)])
    >>> sorted(outcome.vectors)
    [0]
    >>> outcome = admit(expected, [Reply(11, good)], outcome)
    >>> [(rejection.client, rejection.reason) for rejection in outcome.rejected]
    [(1, 'round 3 where 4 was asked'), (0, 'a second reply in one round')]
    >>> sorted(outcome.vectors)
    []
    """
    before = before or Admitted()
    messages, heard = dict(before.messages), dict(before.heard)
    rejected = list(before.rejected)
    for reply in replies:
        client = expected.clients.get(reply.node)
        try:
            if client is None:
                raise wire.WireError("the node was not asked")
            if client in heard:
                if _repeats(heard[client], reply):
                    continue
                messages.pop(client, None)
                raise wire.WireError("a second reply in one round")
            if reply.block is not None:
                heard[client] = reply
            messages[client] = _message(expected, client, reply)
        except wire.WireError as error:
            rejected.append(Rejection.of(reply.node, client, error, reply.unreached and client is not None))
    kept = {client: expected.layout.to_remember(message) for client, message in messages.items()}
    return Admitted(messages, tuple(rejected), heard, kept)


def _repeats(first: Reply, reply: Reply) -> bool:
    """Tell whether a reply only repeats the first one, to another copy of the question, or says nothing."""
    if reply.block is None or first.block is None:
        return reply.block is None
    # Mapped files, of long replies, are equal where their bytes are.
    return reply.question != first.question and memoryview(reply.block) == memoryview(first.block)


def _message(expected: Expected, client: int, reply: Reply) -> Messages:
    """Return the message in a reply; refuse one that is not what this client was asked for."""
    if reply.block is None:
        raise wire.WireError(reply.why if reply.unreached else f"no message but an error: {reply.why}")
    limit = expected.layout.longest.bytes + HEADROOM
    header, tensors = wire.loads(reply.block, expected.answer, limit=limit)
    if header.round != expected.round:
        raise wire.WireError(f"round {header.round} where {expected.round} was asked")
    if (header.run, header.epoch) != (expected.run, expected.epoch):
        raise wire.WireError(
            f"run {header.run!r}, epoch {header.epoch} where {expected.run!r}, {expected.epoch} was asked"
        )
    if header.client != client:
        raise wire.WireError(f"claims to be client {header.client}")
    layout, before = expected.layout, expected.remembered.get(client)
    asked = Asked(expected.round, expected.broadcast, client)
    lies_in_a_file = layout.codec is None and not isinstance(reply.block, bytes)
    try:
        if expected.disk_backed is None or lies_in_a_file:
            message = layout.decode(tensors, before, asked)
        else:
            message = expected.disk_backed.read(layout, tensors, before, asked)
    except UserError as error:
        raise wire.WireError(str(error)) from None
    if not all(bool(torch.isfinite(some).all()) for some in torch.split(message.vectors[0], TOGETHER)):
        raise wire.WireError("the vector is not finite")
    return message


# --- broadcasts, which a client admits ---

Described = dict[str, tuple[torch.Size, torch.dtype]]
"""What tensors look like."""


def described(tensors: State) -> Described:
    """Say what tensors look like.

    >>> described({"params": torch.zeros(3)})
    {'params': (torch.Size([3]), torch.float32)}
    """
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def length_of(expected: Described) -> int:
    """Return how many bytes the numbers of such tensors take.

    >>> length_of(described({"params": torch.zeros(3)}))
    12
    """
    return sum(dtype.itemsize * shape.numel() for shape, dtype in expected.values())


def check_broadcast(broadcast: State, expected: Described, bound: float) -> None:
    """Refuse a broadcast that does not look as expected, is not finite, or exceeds `bound`."""
    if described(broadcast) != expected:
        raise Refused(Reason.BROADCAST, "it does not have the shape of this configuration's")
    for numbers in broadcast.values():
        if not numbers.numel():
            continue
        least, most = (float(one) for one in numbers.aminmax())  # one pass, in which NaN stays NaN
        if not (math.isfinite(least) and math.isfinite(most)):
            raise Refused(Reason.BROADCAST, "it is not finite")
        if max(-least, most) > bound:
            raise Refused(Reason.BROADCAST, f"it exceeds [privacy] broadcast_bound = {bound:g}")
