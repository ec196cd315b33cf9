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
from trilemma.federation.processes.logs import listener
from trilemma.federation.protocol import events
from trilemma.federation.protocol.events import without_quotes

if TYPE_CHECKING:
    from trilemma.federation.client.node import Node
    from trilemma.federation.protocol.wire import Whole


def serve(party: Party, stop: threading.Event) -> None:
    """Answer for a client until told to stop."""
    say = listener(party)

    @cache
    def node() -> Node:
        from trilemma.federation.client.node import Node

        return Node(party, say=say)

    def answer(block: Arrived) -> Whole:
        return node().answer(block)

    def check_length(length: int) -> None:
        node().check_length(length)

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
        check_length=check_length,
        facts=lambda: Facts.of(party).text,
    )
