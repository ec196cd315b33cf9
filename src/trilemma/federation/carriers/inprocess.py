"""A federation in one process: every node is an object, and a question is answered when it is sent.

The smallest transport there is. The federation's tests run over it, and so can a rehearsal: everything but
the network and the processes is the real thing, keys, ledgers and disks included.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from trilemma.federation.client.node import Node
from trilemma.federation.party.layout import Party
from trilemma.federation.protocol.reasons import Refused
from trilemma.federation.protocol.transport import FIRST_NODE, Reply
from trilemma.federation.protocol.wire import Block, Whole


class InProcess:
    """The nodes of these parties' clients. Those of the clients in `gone` are silent."""

    def __init__(self, parties: Iterable[Party], gone: Collection[int] = ()) -> None:
        self.clients = {party.client: Node(party) for party in parties if party.client is not None}
        self.gone = set(gone)
        self._sent = 0
        self._replies: dict[str, Reply] = {}

    def nodes(self) -> Mapping[int, int]:
        """Return the nodes of the clients that are there."""
        return {FIRST_NODE + client: client for client in self.clients if client not in self.gone}

    def send(self, blocks: Mapping[int, bytes], lifetime: float) -> Mapping[str, int]:
        """Let each node answer its block at once; its reply waits to be fetched."""
        questions: dict[str, int] = {}
        for node, block in blocks.items():
            question = f"question {self._sent}"
            self._sent += 1
            questions[question] = node
            reply = None if node - FIRST_NODE in self.gone else self.reply(node, block)
            if reply is not None:
                self._replies[question] = replace(reply, question=question)
        return questions

    def fetch(self, questions: Collection[str]) -> list[Reply]:
        """Return the replies to these questions; those nobody asks for any more are forgotten."""
        there = [self._replies[question] for question in questions if question in self._replies]
        self._replies = {}
        return there

    def reply(self, node: int, block: bytes) -> Reply | None:
        """Return what a node says; None where nothing arrives."""
        try:
            return Reply(node, arrived(self.clients[node - FIRST_NODE].answer(block)))
        except Refused as refusal:
            return Reply(node, error=str(refusal), refused=True)


def arrived(answer: Whole) -> Block:
    """Return an answer as it arrives: a long one lies in a file."""
    if isinstance(answer, bytes):
        return answer
    with tempfile.TemporaryFile() as file:
        file.writelines(answer)
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
