"""The Flower ClientApp: it hands blocks to the client's `Node` and sends back what that says.

Which client it is, and everything it believes, is in the folder named by TRILEMMA_PARTY. What a `Node` needs,
torch before all, is imported when the first block comes: a client waits longer than it works.
"""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from trilemma.errors import UserError
from trilemma.federation.layout import Party
from trilemma.flower.telling import telling

if TYPE_CHECKING:
    from trilemma.federation.node import Node

PARTY = "TRILEMMA_PARTY"
app = ClientApp()
_ONE_AT_A_TIME = threading.Lock()


@lru_cache(maxsize=1)
def node(folder: str) -> Node:
    """Return the client whose folder is given; its data are loaded once per process."""
    from trilemma.federation.node import Node

    party = Party.open(Path(folder))
    return Node(party, say=telling(party))


def query(message: Message, context: Context) -> Message:
    """Answer one block."""
    folder = os.environ.get(PARTY)
    if not folder:
        raise UserError(f"{PARTY} must name this party's folder")
    with _ONE_AT_A_TIME:
        from trilemma.flower import records

        block = node(folder).answer(records.from_record(message.content))
        return Message(records.to_record(block), reply_to=message)


app.query()(query)
