"""A client that notes which pieces of questions reach it, and dies when it has written down one of them.

python flower_dying.py FOLDER NOTES DIES_AT      (a place of a piece, or -1: it lives)
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from trilemma.federation import kinds, wire
from trilemma.federation.layout import Party
from trilemma.federation.node import Node
from trilemma.flower import records, worker


def dying(folder: str, notes: str, dies_at: int) -> ClientApp:
    """Return that client's app."""
    node = Node(Party.open(Path(folder)))

    def query(message: Message, context: Context) -> Message:
        block = records.from_record(message.content)
        answer = node.answer(block)
        if wire.kind_of(block) == kinds.Piece.kind:
            place = wire.loads(block, kinds.Piece)[0].place
            with Path(notes).open("a") as file:
                file.write(f"{place}\n")
            if place == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return Message(records.to_record(answer), reply_to=message)

    app = ClientApp()
    app.query()(query)
    return app


if __name__ == "__main__":
    worker.work(sys.argv[1], client_app=dying(sys.argv[1], sys.argv[2], int(sys.argv[3])))
