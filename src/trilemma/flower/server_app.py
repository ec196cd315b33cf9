"""The Flower ServerApp: it lets a `Coordinator` speak through Flower's grid.

The server's folder is named by TRILEMMA_PARTY, the run by the run configuration (`run`, default "default").
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from logging import INFO
from pathlib import Path

from flwr.app import Context, Message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import ServerApp
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid.http_grid import HttpGrid

from trilemma.errors import UserError
from trilemma.federation import wire
from trilemma.federation.admission import Reply
from trilemma.federation.layout import Party
from trilemma.federation.server import open_run
from trilemma.flower import records
from trilemma.flower.client_app import PARTY
from trilemma.flower.control import node_key_bytes

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

    def __init__(self, grid: HttpGrid, party: Party) -> None:
        self._grid = grid
        self._clients = {node_key_bytes(path): client for client, path in enumerate(party.nodes())}
        self._nodes: dict[str, int] = {}
        self._arriving: dict[str, Future[Message]] = {}

    def nodes(self) -> Mapping[int, int]:
        """Return the connected nodes that belong to the federation."""
        found = self._grid.get_nodes()
        return {
            node.node_id: self._clients[node.public_key] for node in found if node.public_key in self._clients
        }

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
            announced = self._client.PullMessages(PullAppMessagesRequest(message_ids=asked))
            for head, tree in zip(announced.messages_list, announced.message_object_trees, strict=True):
                if head.metadata.reply_to_message_id in asked:
                    self._arriving[head.metadata.reply_to_message_id] = self._in_background(tree)
        # Of what nobody waits for any more nothing is kept, not even the content under way.
        self._nodes = {question: self._nodes[question] for question in questions}
        self._arriving = {q: content for q, content in self._arriving.items() if q in self._nodes}
        wait(self._arriving.values(), timeout=MOMENT)
        done = [question for question, content in self._arriving.items() if content.done()]
        return [self._reply(question, self._arriving.pop(question)) for question in done]

    @property
    def _client(self) -> RuntimeHttpClient:
        return self._grid._runtime_client

    def _in_background(self, tree: ObjectTree) -> Future[Message]:
        """Fetch a message in a thread that does not keep the process alive."""
        content: Future[Message] = Future()
        node, run = self._grid.node, self._grid.run.run_id

        def fetch() -> None:
            try:
                content.set_result(
                    pull_and_inflate_object_from_tree(
                        tree,
                        make_pull_object_fn_protobuf(self._client.PullObject, node, run),
                        make_confirm_message_received_fn_protobuf(
                            self._client.ConfirmMessageReceived, node, run
                        ),
                        return_type=Message,
                    )
                )
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
            refused = message.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            return Reply(node, None, message.error.reason or "unknown", refused, question)
        try:
            return Reply(node, records.from_record(message.content), question=question)
        except wire.WireError as gibberish:
            return Reply(node, None, str(gibberish), refused=True, question=question)


def main(grid: HttpGrid, context: Context) -> None:
    """Run the federation's configuration to its end."""
    folder = os.environ.get(PARTY)
    if not folder:
        raise UserError(f"{PARTY} must name the server's folder")
    party = Party.open(Path(folder))
    run = str(context.run_config.get("run", "default"))
    transport = GridTransport(grid, party)
    open_run(party, run, transport, say=lambda event: log(INFO, "[%s] %s", run, event.text)).go()


app.main()(main)
