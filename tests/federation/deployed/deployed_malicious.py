"""A server that keeps to no protocol: its own program, with a run that tells real nodes what it likes.

python deployed_malicious.py FOLDER WHERE          (what nodes said to which question is written to WHERE)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from trilemma.federation.party.layout import Party
from trilemma.federation.processes import party_process
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion
from trilemma.federation.protocol.transport import Transport
from trilemma.federation.protocol.wire import digest
from trilemma.federation.server import server

DIM = 69
PATIENCE = 40.0
RUN = "malice"


class Malicious:
    """Speaks to the nodes of a federation, all of them or some, and remembers what they answered."""

    def __init__(self, carrier: Transport, party: Party) -> None:
        self.party, self.carrier = party, carrier
        self.said: dict[str, list[str]] = {}
        deadline = time.monotonic() + 90
        while len(self.carrier.nodes()) < len(party.signed_roster.clients) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.node_of = {client: node for node, client in self.carrier.nodes().items()}

    def send(self, blocks: dict[int, bytes]) -> dict[int, bytes | str]:
        """Send each client its block; return its answer, or why it refused; "silence" where none came."""
        sent = self.carrier.send({self.node_of[client]: block for client, block in blocks.items()}, PATIENCE)
        at, heard = {node: client for client, node in self.node_of.items()}, {}
        deadline = time.monotonic() + PATIENCE
        while len(heard) < len(blocks) and time.monotonic() < deadline:
            missing = [question for question, node in sent.items() if at[node] not in heard]
            for reply in self.carrier.fetch(missing):
                heard[at[reply.node]] = reply.error if reply.block is None else bytes(reply.block)
            time.sleep(0.01)
        return {client: heard.get(client, "silence") for client in blocks}

    def tell(self, name: str, blocks: dict[int, bytes]) -> dict[int, bytes | str]:
        """Send blocks, and note under `name` with which words, or with which bytes, they were answered."""
        heard = self.send(blocks)
        self.said[name] = [
            one if isinstance(one, str) else f"{wire.kind_of(one)} {digest(one)}" for one in heard.values()
        ]
        return heard

    def hello(self, name: str, epoch: int, clients: range, expelled=(), terms: str | None = None):
        block = wire.dumps(
            kinds.Hello(run=RUN, epoch=epoch, terms=terms or self.party.agreed.terms, expelled=list(expelled))
        )
        return self.tell(name, dict.fromkeys(clients, block))

    def open(self, epoch: int, clients: range, expelled=()) -> None:
        """Open an epoch as an honest server would."""
        joined = self.hello(f"hello {epoch}", epoch, clients, expelled)
        keys = {str(client): wire.loads(one, kinds.Joined)[0].key for client, one in joined.items()}
        block = wire.dumps(kinds.Keys(run=RUN, epoch=epoch, keys=keys))
        ready = self.tell(f"keys {epoch}", dict.fromkeys(clients, block))
        signed = {str(client): wire.loads(one, kinds.Ready)[0].confirmation for client, one in ready.items()}
        block = wire.dumps(kinds.Confirm(run=RUN, epoch=epoch, confirmations=signed))
        self.tell(f"confirm {epoch}", dict.fromkeys(clients, block))

    def ask(self, name: str, epoch: int, round_: int, params: torch.Tensor, clients: range) -> None:
        header = kinds.Ask(run=RUN, epoch=epoch, round=round_, heard={}, unused=[])
        self.tell(name, dict.fromkeys(clients, wire.dumps(header, {"params": params})))


def lies(server: Malicious) -> None:
    """All that a server might try; the names say what."""
    everybody = range(len(server.party.signed_roster.clients))
    model = torch.zeros(DIM)
    server.hello("other terms", 0, everybody, terms="0" * 64)
    server.open(0, everybody)
    server.ask("first", 0, 0, model, everybody)
    server.ask("again", 0, 0, model, everybody)
    server.ask("same round, other model", 0, 0, model + 1, everybody)
    for number in (1e30, 3e38, float("inf"), float("-inf"), float("nan")):
        server.ask(f"broadcast {number}", 0, 1, torch.full((DIM,), number), everybody)
    server.ask("wrong shape", 0, 1, torch.zeros(DIM + 1), everybody)
    server.ask("wrong type", 0, 1, torch.zeros(DIM, dtype=torch.float64), everybody)
    server.ask("long", 0, 1, torch.zeros(1_000_000), everybody)
    server.ask("no such round", 0, 10_000, model, everybody)
    server.ask("tiny", 0, 1, torch.full((DIM,), 1e-45), everybody)
    server.ask("minus nothing", 0, 2, torch.full((DIM,), -0.0), everybody)
    server.ask("nothing", 0, 2, model, everybody)
    server.tell("gibberish", dict.fromkeys(everybody, b"\xff" * 1000))
    away = AnnouncedExpulsion(client=0, round=1, test="length", statistic=9.0, threshold=7.5)
    server.hello("an expulsion", 1, everybody[1:], [away])
    server.open(1, everybody)
    server.ask("an older epoch", 0, 3, model, everybody)
    server.hello("an older call", 0, everybody)
    server.ask("after that", 1, 3, model, everybody)
    server.ask("huge", 1, 4, torch.zeros(10_000_000), everybody[:1])


class MaliciousRun:
    """In place of a coordinator: it tells lies, and writes down what came of them."""

    task = SimpleNamespace(longest_reply=1 << 30)

    def __init__(self, party: Party, run: str, carrier: Transport, *_: object) -> None:
        self.party, self.carrier = party, carrier

    def go(self) -> None:
        malicious = Malicious(self.carrier, self.party)
        try:
            lies(malicious)
        finally:
            Path(sys.argv[2]).write_text(json.dumps(malicious.said))


if __name__ == "__main__":
    server.open_run = MaliciousRun
    party_process.work(Path(sys.argv[1]))
