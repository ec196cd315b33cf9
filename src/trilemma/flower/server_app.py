"""The Flower ServerApp: it lets a `Coordinator` speak through Flower's grid.

The server's folder is named by TRILEMMA_PARTY, the run by the run configuration (`run`, default "default").
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from logging import INFO
from pathlib import Path

from flwr.app import Context, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from trilemma.errors import UserError
from trilemma.flower import wire
from trilemma.flower.admission import Reply
from trilemma.flower.client_app import PARTY
from trilemma.flower.commits import CommitLog
from trilemma.flower.control import node_key_bytes
from trilemma.flower.coordinator import Coordinator, Patience
from trilemma.flower.layout import Party
from trilemma.flower.task import load_task

app = ServerApp()


class GridExchange:
    """Clients as Flower reaches them. Who sits at a node is told by the key it authenticated with."""

    def __init__(self, grid: Grid, party: Party) -> None:
        self._grid = grid
        self._poll = party.federation.timing.poll
        self._clients = {node_key_bytes(path): client for client, path in enumerate(party.nodes())}

    def nodes(self) -> Mapping[int, int]:
        """Return the connected nodes that belong to the federation."""
        found = self._grid.get_nodes()
        return {
            node.node_id: self._clients[node.public_key] for node in found if node.public_key in self._clients
        }

    def ask(self, blocks: Mapping[int, bytes], patience: Patience) -> list[Reply]:
        """Send, and collect replies until all are there or time is up.

        Flower's own `send_and_receive` looks every 3 s; this looks as often as the federation agreed.
        """
        deadline = time.monotonic() + patience.limit
        # One record for all nodes that get the same block: Flower then uploads it once.
        records = {block: wire.to_record(block) for block in set(blocks.values())}
        messages = [
            Message(records[block], dst_node_id=node, message_type="query", ttl=patience.limit + 60.0)
            for node, block in blocks.items()
        ]
        pushed = list(self._grid.push_messages(messages)) if messages else []
        waiting = {message: node for message, node in zip(pushed, blocks, strict=True) if message is not None}
        replies: list[Reply] = []
        others_done = False
        while waiting and time.monotonic() < deadline:
            for message in self._grid.pull_messages(list(waiting)):
                node = waiting.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    replies.append(_reply(node, message))
            if not others_done and patience.doubtful.issuperset(waiting.values()):
                others_done = True
                deadline = min(deadline, time.monotonic() + patience.grace)
            if waiting:
                time.sleep(self._poll)
        return replies


def _reply(node: int, message: Message) -> Reply:
    if message.has_error():
        refused = message.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        return Reply(node, error=message.error.reason or "unknown", refused=refused)
    try:
        return Reply(node, wire.from_record(message.content))
    except wire.WireError as error:
        return Reply(node, error=str(error))


def main(grid: Grid, context: Context) -> None:
    """Run the federation's configuration to its end."""
    folder = os.environ.get(PARTY)
    if not folder:
        raise UserError(f"{PARTY} must name the server's folder")
    party = Party.open(Path(folder))
    run = str(context.run_config.get("run", "default"))
    Coordinator(
        run=run,
        party=party,
        task=load_task(party),
        exchange=GridExchange(grid, party),
        log=CommitLog(party.run_folder(run)),
        say=lambda progress: log(INFO, "[%s] %s", run, progress.text),
    ).go()


app.main()(main)
