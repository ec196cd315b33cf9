"""A client's process: it holds one line to the server, and hands what comes to its `Node`.

What a `Node` needs, torch before all, is imported when the first block comes: a client waits longer than it
works.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

from trilemma.federation import events
from trilemma.federation.carriers.grpc import client as carrier
from trilemma.federation.carriers.grpc.credentials import Tls
from trilemma.federation.carriers.grpc.transfers import Arrived
from trilemma.federation.event_fields import without_quotes
from trilemma.federation.facts import Facts
from trilemma.federation.layout import Party
from trilemma.federation.sizes import PIECE, ROOM
from trilemma.federation.telling import telling

if TYPE_CHECKING:
    from trilemma.federation.long_blocks import Whole
    from trilemma.federation.node import Node


def serve(party: Party, stop: threading.Event) -> None:
    """Answer for a client until told to stop."""
    say = telling(party)

    @cache
    def node() -> Node:
        from trilemma.federation.node import Node

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
