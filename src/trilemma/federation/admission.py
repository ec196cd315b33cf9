"""Admission: which replies enter a round, and why the others do not.

A pure function from what arrived to what is accepted. A reply that is malformed, late, of another round, of
the wrong shape or type, too long, or not finite, and one that contradicts an earlier one, is rejected with a
reason; its sender counts as Byzantine for the round and the round goes on. Nothing a client says about itself
is believed: who it is comes from the node it is connected by, and there are no client-reported metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilemma.federation import wire

HEADROOM = 4096
"""Bytes a header may take beside the vector."""


@dataclass(frozen=True)
class Expected:
    """What an admissible reply looks like. `clients` maps nodes that were asked to the clients they are."""

    run: str
    epoch: int
    round: int
    dim: int
    clients: Mapping[int, int]


@dataclass(frozen=True)
class Reply:
    """What came from a node: a block, or an error in its place.

    `refused` tells a client that said no from one that Flower could not reach; `question` names what is
    answered, where a node may have been asked the same twice.
    """

    node: int
    block: bytes | None = None
    error: str = ""
    refused: bool = False
    question: str = ""


@dataclass(frozen=True)
class Rejection:
    """A reply that was not accepted. `client` is None where the node is nobody in this epoch."""

    node: int
    client: int | None
    reason: str


@dataclass(frozen=True)
class Admitted:
    """The outcome so far of a round: vectors by client, every rejection, and every client's first block."""

    vectors: Mapping[int, Tensor] = field(default_factory=dict)
    rejected: tuple[Rejection, ...] = ()
    heard: Mapping[int, Reply] = field(default_factory=dict)

    def stack(self, rows: Iterable[int], dim: int) -> Tensor:
        """Return one row per client of `rows`; a client without an accepted vector is a row of NaN.

        That is how a rule is told about absence: rows that are not finite count against f.
        """
        absent = torch.full((dim,), torch.nan)
        return torch.stack([self.vectors.get(client, absent) for client in rows])


def admit(expected: Expected, replies: Iterable[Reply], before: Admitted | None = None) -> Admitted:
    """Decide about every reply, in the order of arrival; `before` is the outcome of the round so far.

    A client speaks once in a round. Asked twice, an honest one gives the same bytes twice, which is no second
    reply; whoever says two things is not honest, and neither of them counts.

    >>> expected = Expected("run", epoch=0, round=4, dim=2, clients={11: 0, 12: 1})
    >>> good = wire.dumps(wire.Answer(client=0, run="run", epoch=0, round=4), {"vector": torch.ones(2)})
    >>> old = wire.dumps(wire.Answer(client=1, run="run", epoch=0, round=3), {"vector": torch.ones(2)})
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
    vectors, heard = dict(before.vectors), dict(before.heard)
    rejected = list(before.rejected)
    for reply in replies:
        client = expected.clients.get(reply.node)
        try:
            if client is None:
                raise wire.WireError("the node was not asked")
            if client in heard:
                if _repeats(heard[client], reply):
                    continue
                vectors.pop(client, None)
                raise wire.WireError("a second reply in one round")
            if reply.block is not None:
                heard[client] = reply
            vectors[client] = _vector(expected, client, reply)
        except wire.WireError as error:
            rejected.append(Rejection(reply.node, client, str(error)))
    return Admitted(vectors, tuple(rejected), heard)


def _repeats(first: Reply, reply: Reply) -> bool:
    """Tell whether a reply only repeats the first one, to another copy of the question, or says nothing."""
    return reply.block is None or (reply.question != first.question and reply.block == first.block)


def _vector(expected: Expected, client: int, reply: Reply) -> Tensor:
    if reply.block is None:
        raise wire.WireError(f"no message but an error: {reply.error}")
    header, tensors = wire.loads(reply.block, wire.Answer, limit=4 * expected.dim + HEADROOM)
    if header.round != expected.round:
        raise wire.WireError(f"round {header.round} where {expected.round} was asked")
    if (header.run, header.epoch) != (expected.run, expected.epoch):
        raise wire.WireError(
            f"run {header.run!r}, epoch {header.epoch} where {expected.run!r}, {expected.epoch} was asked"
        )
    if header.client != client:
        raise wire.WireError(f"claims to be client {header.client}")
    if set(tensors) != {"vector"}:
        raise wire.WireError(f"tensors {sorted(tensors)} where only a vector was asked")
    vector = tensors["vector"]
    if vector.dtype != torch.float32:
        raise wire.WireError(f"type {vector.dtype} where float32 was asked")
    if vector.shape != (expected.dim,):
        raise wire.WireError(f"shape {tuple(vector.shape)} where ({expected.dim},) was asked")
    if not torch.isfinite(vector).all():
        raise wire.WireError("the vector is not finite")
    return vector
