"""The Flower ServerApp: it lets a `Coordinator` speak through Flower's grid.

The server's folder is named by TRILEMMA_PARTY, the run by the run configuration (`run`, default "default").
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from trilemma.errors import UserError
from trilemma.federation import wire
from trilemma.federation.admission import Reply
from trilemma.federation.layout import Party
from trilemma.federation.server import open_run
from trilemma.flower import internals, records
from trilemma.flower.client_app import PARTY
from trilemma.flower.control import node_key_bytes
from trilemma.flower.telling import telling

app = ServerApp()

MARGIN = 20.0
"""Seconds by which a question outlives its last use on the SuperLink: in 1.41 looking for the reply to a
message that has just expired is an error there."""

MOMENT = 0.2
"""Seconds given to contents under way before the server looks elsewhere: small ones need no second look."""


class GridTransport:
    """Flower's grid as a `Transport`. Who sits at a node is told by the key it authenticated with.

    Flower's own `send_and_receive` looks every 3 s, and its `pull_messages` waits for the content of every
    reply that was announced: a client that announces one and uploads nothing would hold up all the others.
    Here each content is fetched in a thread of its own, and whoever is done is heard.
    """

    def __init__(self, grid: Grid, party: Party) -> None:
        self._grid = grid
        self._party = party
        self._nodes: dict[str, int] = {}
        self._arriving: dict[str, Future[Message]] = {}

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
        pushed = list(self._grid.push_messages(messages))
        if len(pushed) < len(messages):
            raise UserError("the SuperLink takes no messages of this size: the model is too large for it")
        sent = {message: node for message, node in zip(pushed, blocks, strict=True) if message}
        self._nodes |= sent
        return sent

    def fetch(self, questions: Collection[str]) -> list[Reply]:
        """Ask for announcements, begin to fetch what was announced, and return what is complete."""
        asked = [question for question in questions if question not in self._arriving]
        if asked:
            for question, tree in internals.announced(self._grid, asked).items():
                if question in asked:
                    self._arriving[question] = self._in_background(tree)
        # Of what nobody waits for any more nothing is kept, not even the content under way.
        self._nodes = {question: self._nodes[question] for question in questions}
        self._arriving = {q: content for q, content in self._arriving.items() if q in self._nodes}
        wait(self._arriving.values(), timeout=MOMENT)
        done = [question for question, content in self._arriving.items() if content.done()]
        return [self._reply(question, self._arriving.pop(question)) for question in done]

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
    open_run(party, run, transport, telling(party, run)).go()


app.main()(main)
