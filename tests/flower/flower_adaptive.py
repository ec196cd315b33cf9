"""A client that lies as adaptive liars do: the honest worker with a ClientApp that knows nearly everything.

python flower_adaptive.py FOLDER LIARS ROUND

The last LIARS clients of the federation lie, and are careless from ROUND on (`federation_liars`). All folders
are on this machine: the server's state and the others' answers are read there, as soon as they are written.
What a liar sees of everybody's keys is kept beside its own (`noted/`), for who compares afterwards.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

sys.path.insert(0, str(Path(__file__).parents[1]))

from federation_liars import Liars, careless_from, protocol_message
from trilemma.federation import kinds, wire
from trilemma.federation.commits import CommitLog
from trilemma.federation.layout import Party, parties
from trilemma.federation.node import Node
from trilemma.federation.sessions import Session
from trilemma.flower import records, worker
from trilemma.flower.telling import telling

PATIENCE = 60.0
"""Seconds a liar waits for the others' answers."""


class Adaptive:
    """A liar among `everybody`."""

    def __init__(self, party: Party, liars: int, careless: int) -> None:
        self.node = Node(party, say=telling(party))
        self.everybody = parties(party.folder.parent)
        server = self.everybody[0]
        self.liars = Liars.of(server, server.config.read_text(), liars, careless_from(careless))
        self.lies: dict[tuple[int, int], dict[int, wire.Tensors]] = {}

    def answer(self, asked: bytes) -> bytes:
        """Answer as the protocol says, and say something else."""
        answer = self.node.answer(asked)
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


def lying(folder: str, liars: str, careless: str) -> ClientApp:
    """Return a ClientApp that lies."""
    adaptive = Adaptive(Party.open(Path(folder)), int(liars), int(careless))

    def query(message: Message, context: Context) -> Message:
        return Message(
            records.to_record(adaptive.answer(records.from_record(message.content))), reply_to=message
        )

    app = ClientApp()
    app.query()(query)
    return app


if __name__ == "__main__":
    worker.work(sys.argv[1], client_app=lying(*sys.argv[1:]))
