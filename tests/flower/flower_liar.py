"""A client that lies: the honest worker with a ClientApp that changes what the node says.

python flower_liar.py FOLDER HOW
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from trilemma.flower import wire
from trilemma.flower.layout import Party
from trilemma.flower.node import Node
from trilemma.flower.worker import work

app = ClientApp()
folder, how = sys.argv[1:]
node = Node(Party.open(Path(folder)))
remembered: list[bytes] = []


def lie(block: bytes) -> bytes:
    """Return what this liar sends in place of an honest answer."""
    header, tensors = wire.loads(block, wire.Answer)
    vector = tensors["vector"]
    match how:
        case "silent":
            time.sleep(600)
        case "nan":
            vector[3] = torch.nan
        case "oversized":
            vector = torch.zeros(2_000_000)
        case "replayed":
            remembered.append(block)
            return remembered[0]
        case "gibberish":
            return b"gibberish"
        case "huge":
            vector = torch.full_like(vector, 1e30)
    return wire.dumps(header, {"vector": vector})


def query(message: Message, context: Context) -> Message:
    asked = wire.from_record(message.content)
    block = node.answer(asked)
    if wire.kind_of(asked) == wire.Ask.kind:
        block = lie(block)
    return Message(wire.to_record(block), reply_to=message)


app.query()(query)
work(folder, client_app=app)
