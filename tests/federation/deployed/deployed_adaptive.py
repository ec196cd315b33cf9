"""A client that lies as adaptive liars do: it knows nearly everything (`deployed_liar.py`).

The last LIARS clients of the federation lie, and are careless from ROUND on (`federation_liars`). All folders
are on this machine: the server's state and the others' answers are read there, as soon as they are written.
What a liar sees of everybody's keys is kept beside its own (`noted/`), for who compares afterwards.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from federation_liars import Liars, careless_from, protocol_message
from trilemma.federation.client.node import Node
from trilemma.federation.client.sessions import Session
from trilemma.federation.party.layout import parties
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.server.commits import CommitLog

Answer = Callable[[Node, wire.Block], wire.Block]

PATIENCE = 60.0
"""Seconds a liar waits for the others' answers."""


class Adaptive:
    """A liar among `everybody`."""

    def __init__(self, node: Node, honest: Answer, liars: int, careless: int) -> None:
        self.node, self.honest = node, honest
        self.everybody = parties(node.party.folder.parent)
        server = self.everybody[0]
        self.liars = Liars.of(server, server.config.read_text(), liars, careless_from(careless))
        self.lies: dict[tuple[int, int], dict[int, wire.Tensors]] = {}

    def answer(self, asked: wire.Block) -> wire.Block:
        """Answer as the protocol says, and say something else."""
        answer = self.honest(self.node, asked)
        if wire.kind_of(asked) != kinds.Ask.kind:
            return answer
        ask, broadcast = wire.loads(asked, kinds.Ask)
        self._note(ask)
        if (ask.epoch, ask.round) not in self.lies:
            commit = CommitLog(self.everybody[0].run_folder(ask.run)).last()
            assert commit is not None
            protocol = {client: self._wait_for(client, ask, broadcast) for client in commit.epoch.members}
            self.lies[ask.epoch, ask.round] = self.liars.lie(ask, broadcast, commit.server, protocol)
        header, _ = wire.loads(answer, kinds.Answer)
        return wire.dumps(header, self.lies[ask.epoch, ask.round][self.node.client])

    def _wait_for(self, client: int, ask: kinds.Ask, broadcast: wire.Tensors):
        party, deadline = self.everybody[1 + client], time.monotonic() + PATIENCE
        while True:
            found = protocol_message(party, self.liars.task, ask.run, ask.round, broadcast)
            if found is not None:
                return found
            assert time.monotonic() < deadline, f"client {client} does not answer"
            time.sleep(0.05)

    def _note(self, ask: kinds.Ask) -> None:
        """Keep everybody's keys of an epoch: while one of its rounds is asked, all have them."""
        for party in self.everybody[1:]:
            known = Session(party, ask.run).secrets
            kept = self.node.party.folder / "noted" / f"{ask.epoch}-{party.client}"
            if known is not None and known.epoch == ask.epoch and not kept.exists():
                kept.parent.mkdir(exist_ok=True)
                shutil.copy(party.run_folder(ask.run) / "session", kept)
