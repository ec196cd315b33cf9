"""A client that lies: a party's own program, with a `Node` that changes what it says.

    python deployed_liar.py FOLDER HOW …

silent, large, changing: what it answers in place of a message. dying NOTES PLACE: it notes which pieces of
questions reach it, and dies when it has written down that one (-1: it lives). adaptive LIARS ROUND: as
`deployed_adaptive.py` says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trilemma.federation.carriers.grpc.frames import Frame
from trilemma.federation.carriers.grpc.transfers import Incoming
from trilemma.federation.client.node import Node
from trilemma.federation.processes import party_process
from trilemma.federation.protocol import kinds, wire

HONEST = Node.answer
Answer = Callable[[Node, wire.Block], wire.Block]


def changing(how: str) -> Answer:
    """Return a node's answer that is not an honest one."""
    remembered: list[bytes] = []

    def answer(node: Node, asked: wire.Block) -> wire.Block:
        block = HONEST(node, asked)
        if wire.kind_of(asked) != kinds.Ask.kind:
            return block
        header, tensors = wire.loads(block, kinds.Answer)
        ((name, sent),) = tensors.items()
        remembered.append(block)
        match how, header.round:
            case "silent", _:
                time.sleep(600)
            case "large", _:
                sent = torch.zeros(50_000_000, dtype=torch.uint8)
            case "changing", 0:
                name, sent = "vector", torch.full((69,), torch.nan)
            case "changing", 1:
                return remembered[0]
            case "changing", _:
                sent = torch.zeros(8_000_000, dtype=sent.dtype)
        return wire.dumps(header, {name: sent})

    return answer


def dying(notes: str, dies_at: str) -> Answer:
    """Return an honest answer; the process ends in the middle of a transfer."""
    take = Incoming.take

    def noting(incoming: Incoming, frame: Frame) -> int | None:
        again = take(incoming, frame)
        with Path(notes).open("a") as file:
            file.write(f"{frame.number}\n")
        if frame.number == int(dies_at):
            os.kill(os.getpid(), signal.SIGKILL)
        return again

    Incoming.take = noting
    return HONEST


def adaptive(liars: str, careless: str) -> Answer:
    """Return the answer of a liar who knows nearly everything."""
    from deployed_adaptive import Adaptive

    who: list[Adaptive] = []

    def answer(node: Node, block: wire.Block) -> wire.Block:
        if not who:
            who.append(Adaptive(node, HONEST, int(liars), int(careless)))
        return who[0].answer(block)

    return answer


if __name__ == "__main__":
    folder, how, *rest = sys.argv[1:]
    kinds_of_liars = {"dying": dying, "adaptive": adaptive}
    Node.answer = kinds_of_liars[how](*rest) if how in kinds_of_liars else changing(how)
    party_process.work(Path(folder))
