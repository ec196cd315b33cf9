"""A server that says to each node whatever it likes, and what nodes say to that."""

from __future__ import annotations

import pytest
import torch

from trilemma.federation.client import spending
from trilemma.federation.client.node import Node
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.reasons import Refused
from trilemma.learning.messages import Asked
from trilemma.privacy.ledger.ledger import Ledger

DIM = 69


class Server:
    """Speaks to the nodes of `parties` as it pleases."""

    def __init__(self, parties, run="run"):
        self.parties, self.run = parties, run
        self.nodes = {party.client: Node(party) for party in parties[1:]}

    def hello(self, epoch, members, expelled=()):
        terms = self.parties[0].agreed.terms
        block = wire.dumps(kinds.Hello(run=self.run, epoch=epoch, terms=terms, expelled=list(expelled)))
        replies = {client: self.nodes[client].answer(block) for client in members}
        return {client: wire.loads(reply, kinds.Joined)[0].key for client, reply in replies.items()}

    def keys(self, client, epoch, offers):
        keys = {str(member): offer for member, offer in offers.items()}
        block = wire.dumps(kinds.Keys(run=self.run, epoch=epoch, keys=keys))
        return wire.loads(self.nodes[client].answer(block), kinds.Ready)[0].confirmation

    def confirm(self, client, epoch, confirmations):
        texts = {str(member): text for member, text in confirmations.items()}
        block = wire.dumps(kinds.Confirm(run=self.run, epoch=epoch, confirmations=texts))
        answer = self.nodes[client].answer(block)
        if wire.kind_of(answer) == kinds.Doubted.kind:
            return set(wire.loads(answer, kinds.Doubted)[0].shown)
        wire.loads(answer, kinds.Confirmed)
        return set()

    def open(self, epoch, members, expelled=()):
        """Open an epoch as an honest server would."""
        offers = self.hello(epoch, members, expelled)
        confirmations = {client: self.keys(client, epoch, offers) for client in members}
        for client in members:
            self.confirm(client, epoch, confirmations)

    def ask(self, client, epoch, round_, number=0.0):
        """Ask for a step from a broadcast of `number`s; return what was sent, decoded."""
        node, broadcast = self.nodes[client], {"params": torch.full((DIM,), number)}
        block = wire.dumps(kinds.Ask(run=self.run, epoch=epoch, round=round_, heard={}, unused=[]), broadcast)
        sent = wire.loads(node.answer(block), kinds.Answer)[1]
        return node.task.message.decode(sent, asked=Asked(round_, broadcast)).vectors[0]


def opened(parties, rounds=0):
    """Return a server whose first epoch is open to everybody, and client 0's answers to so many rounds."""
    server = Server(parties)
    server.open(0, tuple(server.nodes))
    for round_ in range(rounds):
        server.ask(0, 0, round_)
    return server


def refusal(reason, call, *arguments):
    """Check that a node refuses with this reason, and says nothing but the catalogue's text."""
    with pytest.raises(Refused) as caught:
        call(*arguments)
    assert str(caught.value) == reason.told
    assert (caught.value.reason, caught.value.detail) == (reason, "")


def entries(party):
    with Ledger(party.ledger, spending.read_budget(party)) as ledger:
        return list(ledger.entries)
