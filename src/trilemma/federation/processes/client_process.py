"""A client's process: it holds one line to the server, and hands what comes to its `Node`.

What a `Node` needs, torch before all, is imported when the first block comes: a client waits longer than it
works.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

from trilemma.federation.carriers.grpc import client as carrier
from trilemma.federation.carriers.grpc.credentials import Tls
from trilemma.federation.carriers.grpc.transfers import Arrived
from trilemma.federation.party.facts import Facts
from trilemma.federation.party.layout import Party
from trilemma.federation.processes.telling import telling
from trilemma.federation.protocol import events
from trilemma.federation.protocol.event_fields import without_quotes
from trilemma.federation.protocol.sizes import PIECE, ROOM

if TYPE_CHECKING:
    from trilemma.federation.client.node import Node
    from trilemma.federation.protocol.long_blocks import Whole


def serve(party: Party, stop: threading.Event) -> None:
    """Answer for a client until told to stop."""
    say = telling(party)

    @cache
    def node() -> Node:
        from trilemma.federation.client.node import Node

        return Node(party, say=say)

    def answer(block: Arrived) -> Whole:
        return node().answer(block)

    def line(said: str) -> None:
        say(events.LINE(what=without_quotes(said)))

    party.ready.touch()
    carrier.serve(
        answer,
        party.federation.address,
        Tls(party.certificate, party.certificate_key, party.authority),
        stop,
        line,
        spool=party.state / "arriving",
        longest=lambda: PIECE + ROOM,
        facts=lambda: Facts.of(party).text,
    )
