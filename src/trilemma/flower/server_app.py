"""The Flower ServerApp: it lets a `Coordinator` speak through Flower's grid.

The server's folder is named by TRILEMMA_PARTY, the run by the run configuration (`run`, default "default").
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from trilemma.errors import UserError
from trilemma.federation import wire
from trilemma.federation.layout import Party
from trilemma.federation.server import open_run
from trilemma.federation.transport import Reply
from trilemma.federation.under_way import under_way
from trilemma.flower import internals, records
from trilemma.flower.bell import Bell
from trilemma.flower.client_app import PARTY
from trilemma.flower.control import node_key_bytes
from trilemma.flower.telling import telling

app = ServerApp()

MARGIN = 20.0
"""Seconds by which a question outlives its last use on the SuperLink: in 1.41 looking for the reply to a
message that has just expired is an error there."""

MOMENT = 0.2
"""Seconds given to contents under way before the server looks elsewhere: small ones need no second look."""


LOOK = 2.0
"""Seconds between two looks whether a node was started anew."""


@dataclass(frozen=True)
class _Sent:
    """A message that carries a question, until when it is welcome, and since when its node had run."""

    question: str
    block: bytes
    until: float
    since: str | None


class GridTransport:
    """Flower's grid as a `Transport`. Who sits at a node is told by the key it authenticated with.

    Flower's own `send_and_receive` looks every 3 s, and its `pull_messages` waits for the content of every
    reply that was announced: a client that announces one and uploads nothing would hold up all the others.
    Here each content is fetched in a thread of its own, and whoever is done is heard.

    A node that was started anew has lost what it was asked: it gets a copy, under the name of the question.
    """

    def __init__(self, grid: Grid, party: Party) -> None:
        self._grid = grid
        self._party = party
        self._nodes: dict[str, int] = {}
        self._sent: dict[str, _Sent] = {}
        self._looked = 0.0
        self._arriving: dict[str, Future[Message]] = {}
        self._bell = Bell.of_this_party()

    def nodes(self) -> Mapping[int, int]:
        """Return the connected nodes that belong to the federation, as its roster is now."""
        found, roster = internals.nodes(self._grid), self._party.signed_roster
        clients = {node_key_bytes(public): client for client, public in roster.nodes.items()}
        return {node: clients[key] for node, key in found.items() if key in clients}

    def send(self, blocks: Mapping[int, bytes], lifetime: float) -> Mapping[str, int]:
        """Send; a question's name is the id of Flower's message."""
        # One record for all nodes that get the same block: Flower then uploads it once.
        contents = {block: records.to_record(block) for block in set(blocks.values())}
        messages = [
            Message(contents[block], dst_node_id=node, message_type="query", ttl=lifetime + MARGIN)
            for node, block in blocks.items()
        ]
        started = internals.activations(self._grid)
        pushed = self._push(messages)
        if len(pushed) < len(messages):
            raise UserError("the SuperLink takes no messages of this size: the model is too large for it")
        sent = {message: node for message, node in zip(pushed, blocks, strict=True) if message}
        self._nodes |= sent
        until = time.monotonic() + lifetime
        self._sent |= {
            message: _Sent(message, blocks[node], until, started.get(node)) for message, node in sent.items()
        }
        return sent

    def fetch(self, questions: Collection[str]) -> list[Reply]:
        """Ask for announcements, begin to fetch what was announced, and return what is complete."""
        self._send_again([question for question in questions if question not in self._arriving])
        asked = {
            message: sent.question
            for message, sent in self._sent.items()
            if sent.question in questions and sent.question not in self._arriving
        }
        if asked:
            for message, tree in internals.announced(self._grid, list(asked)).items():
                if message in asked and asked[message] not in self._arriving:
                    self._arriving[asked[message]] = self._in_background(tree)
        # Of what nobody waits for any more nothing is kept, not even the content under way.
        self._nodes = {question: self._nodes[question] for question in questions}
        self._sent = {message: sent for message, sent in self._sent.items() if sent.question in self._nodes}
        self._arriving = {q: content for q, content in self._arriving.items() if q in self._nodes}
        wait(self._arriving.values(), timeout=MOMENT)
        done = [question for question, content in self._arriving.items() if content.done()]
        return [self._reply(question, self._arriving.pop(question)) for question in done]

    def _send_again(self, questions: Collection[str]) -> None:
        """Send copies of open questions to nodes that were started since."""
        now = time.monotonic()
        if not questions or now - self._looked < LOOK:
            return
        self._looked, started = now, internals.activations(self._grid)
        for message, sent in list(self._sent.items()):
            since = started.get(self._nodes.get(sent.question, -1), sent.since)
            left = sent.until - now
            if sent.question in questions and since != sent.since and left > 0:
                node = self._nodes[sent.question]
                content = records.to_record(sent.block)
                copy = Message(content, dst_node_id=node, message_type="query", ttl=left + MARGIN)
                (pushed,) = self._push([copy])
                self._sent[message] = replace(sent, since=since)
                if pushed:
                    self._sent[pushed] = replace(sent, since=since)

    def _push(self, messages: list[Message]) -> list[str]:
        """Hand messages to the SuperLink, and let the guard know: it keeps clients waiting for them."""
        pushed = list(self._grid.push_messages(messages))
        self._bell.ring()
        return pushed

    def _in_background(self, tree: Any) -> Future[Message]:
        """Fetch a message in a thread that does not keep the process alive."""
        content: Future[Message] = Future()

        def fetch() -> None:
            try:
                content.set_result(internals.content(self._grid, tree))
            except Exception as error:  # whatever a client sent: it costs nobody but this client
                content.set_exception(error)

        threading.Thread(target=fetch, daemon=True).start()
        return content

    def _reply(self, question: str, content: Future[Message]) -> Reply:
        node = self._nodes.pop(question)
        error = content.exception()
        if error is not None:
            return Reply(node, error=f"its content did not arrive: {error}", question=question)
        message = content.result()
        if message.has_error():
            reason = message.error.reason or "unknown"
            return Reply(node, None, reason, internals.refused(message), question)
        try:
            return Reply(node, records.from_record(message.content), question=question)
        except wire.WireError as gibberish:
            return Reply(node, None, str(gibberish), refused=True, question=question)


def main(grid: Grid, context: Context) -> None:
    """Run the federation's configuration to its end."""
    folder = os.environ.get(PARTY)
    if not folder:
        raise UserError(f"{PARTY} must name the server's folder")
    party = Party.open(Path(folder))
    run = str(context.run_config.get("run", "default"))
    transport = GridTransport(grid, party)
    with under_way(party, run, internals.BROKEN_OFF):
        open_run(party, run, transport, telling(party, run)).go()


app.main()(main)
