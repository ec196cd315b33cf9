"""A server that keeps to no protocol: its own program, with a run that tells real nodes what it likes.

python deployed_malicious.py FOLDER WHERE          (what nodes said to which question is written to WHERE)
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from trilemma.federation.party.layout import Party
from trilemma.federation.processes import party_process
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.federation.protocol.transport import Transport
from trilemma.federation.server import coordinator

DIM, PATIENCE, RUN = 69, 90.0, "malice"


@dataclass
class Remote:
    """A real node, as the malicious server of one process has them."""

    carrier: Transport
    node: int

    def answer(self, block: bytes) -> bytes:
        (question,) = self.carrier.send({self.node: block}, PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for reply in self.carrier.fetch([question]):
                if reply.block is None:
                    raise Refused(Reason[reply.error.partition(":")[0].upper()])
                return bytes(reply.block)
            time.sleep(0.01)
        raise AssertionError("silence")


class MaliciousRun:
    """In place of a coordinator: it tells lies, and writes down what came of them."""

    task = SimpleNamespace(longest_reply=1 << 30)

    def __init__(self, party: Party, run: str, carrier: Transport, *_: object) -> None:
        from malicious_server import Server

        self.said: dict[str, list[str]] = {}
        self.server = Server([party], RUN)
        deadline = time.monotonic() + PATIENCE
        while len(carrier.nodes()) < len(party.signed_roster.clients) and time.monotonic() < deadline:
            time.sleep(0.2)
        self.server.nodes = {client: Remote(carrier, node) for node, client in carrier.nodes().items()}

    def go(self) -> None:
        try:
            self.lies()
        finally:
            Path(sys.argv[2]).write_text(json.dumps(self.said))

    def tell(
        self, name: str, header: kinds.Header, params: torch.Tensor | None = None, most: int = 9
    ) -> None:
        """Send a block, and note under `name` with which word, or which bytes, it was answered."""
        block = wire.dumps(header, {} if params is None else {"params": params})
        for client in sorted(self.server.nodes)[:most]:
            try:
                said = self.server.nodes[client].answer(block)
                told = f"{wire.kind_of(said)} {wire.digest(said)}"
            except Refused as refusal:
                told = str(refusal)
            self.said.setdefault(name, []).append(told)

    def ask(self, name: str, epoch: int, round_: int, params: torch.Tensor, most: int = 9) -> None:
        self.tell(name, kinds.Ask(run=RUN, epoch=epoch, round=round_, heard={}, unused=[]), params, most)

    def lies(self) -> None:
        """All that a server might try; the names say what."""
        model, everybody = torch.zeros(DIM), sorted(self.server.nodes)
        terms = self.server.parties[0].agreed.terms
        self.tell("other terms", kinds.Hello(run=RUN, epoch=0, terms="0" * 64))
        self.server.open(0, everybody)
        self.ask("first", 0, 0, model)
        self.ask("again", 0, 0, model)
        self.ask("same round, other model", 0, 0, model + 1)
        for number in (1e30, 3e38, float("inf"), float("-inf"), float("nan")):
            self.ask(f"broadcast {number}", 0, 1, torch.full((DIM,), number))
        self.ask("wrong shape", 0, 1, torch.zeros(DIM + 1))
        self.ask("wrong type", 0, 1, torch.zeros(DIM, dtype=torch.float64))
        self.ask("long", 0, 1, torch.zeros(1_000_000))
        self.ask("no such round", 0, 10_000, model)
        self.ask("tiny", 0, 1, torch.full((DIM,), 1e-45))
        self.ask("minus nothing", 0, 2, torch.full((DIM,), -0.0))
        self.ask("nothing", 0, 2, model)
        self.tell("gibberish", kinds.Noted(client=0, run=RUN))
        away = AnnouncedExpulsion(client=0, round=1, test="length", statistic=9.0, threshold=7.5)
        self.tell("an expulsion", kinds.Hello(run=RUN, epoch=1, terms=terms, expelled=[away]))
        self.server.open(1, everybody)
        self.ask("an older epoch", 0, 3, model)
        self.tell("an older call", kinds.Hello(run=RUN, epoch=0, terms=terms))
        self.ask("after that", 1, 3, model)
        self.ask("huge", 1, 4, torch.zeros(10_000_000), most=1)


if __name__ == "__main__":
    coordinator.open_run = MaliciousRun
    party_process.work(Path(sys.argv[1]))
