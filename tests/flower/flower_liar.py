"""A client that lies: the honest worker with a ClientApp that changes what the node says.

python flower_liar.py FOLDER HOW
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supernode.runtime import run_clientapp

from trilemma.federation import kinds, wire
from trilemma.federation.layout import Party
from trilemma.federation.node import Node
from trilemma.flower import internals, records, worker


def lie(how: str, block: bytes, remembered: list[bytes]) -> bytes:
    """Return what this liar sends in place of an honest answer."""
    header, tensors = wire.loads(block, kinds.Answer)
    ((name, sent),) = tensors.items()
    remembered.append(block)
    match how, header.round:
        case "silent", _:
            time.sleep(600)
        case "large", _:
            sent = torch.zeros(50_000_000, dtype=torch.uint8)
        case "changing", 0:
            name, sent = "vector", torch.full((69,), torch.nan)
        case "changing", 1:
            return remembered[0]
        case "changing", _:
            sent = torch.zeros(8_000_000, dtype=sent.dtype)
    return wire.dumps(header, {name: sent})


def liar(folder: str, how: str) -> ClientApp:
    """Return a ClientApp that lies."""
    node = Node(Party.open(Path(folder)))
    remembered: list[bytes] = []

    def query(message: Message, context: Context) -> Message:
        asked = records.from_record(message.content)
        block = node.answer(asked)
        if wire.kind_of(asked) == kinds.Ask.kind:
            block = lie(how, block, remembered)
            if how == "twice":
                more.append(Message(records.to_record(contradiction(block)), reply_to=message))
        return Message(records.to_record(block), reply_to=message)

    more: list[Message] = []
    if how == "twice":
        push_everything(more)
    if how == "announces":
        push_announcements()
    app = ClientApp()
    app.query()(query)
    return app


def contradiction(block: bytes) -> bytes:
    """Return an answer that is not the answer."""
    header, tensors = wire.loads(block, kinds.Answer)
    return wire.dumps(header, {name: sent ^ 1 for name, sent in tensors.items()})


def push_everything(more: list[Message]) -> None:
    """Let the worker push, after each reply, what is in `more`: other replies to the same message."""
    honest = internals.push_message

    def push(client: object, message: Message, context: Context) -> None:
        honest(client, message, context)
        while more:
            honest(client, more.pop(), context)

    internals.push_message = push


def push_announcements() -> None:
    """Let the worker announce its answers and keep what is in them."""
    honest = internals.push_message

    def push(client: object, message: Message, context: Context) -> None:
        kind = None if message.has_error() else wire.kind_of(records.from_record(message.content))
        with mock.patch.object(run_clientapp, "push_objects") if kind == "answer" else nullcontext():
            honest(client, message, context)

    internals.push_message = push


if __name__ == "__main__":
    worker.work(sys.argv[1], client_app=liar(*sys.argv[1:]))
