"""A federation over Flower: a ServerApp and a ClientApp, and nothing that Flower does not document.

    # app.py of a Flower app, whose pyproject.toml names app:server_app and app:client_app
    from trilemma.flower import client_app, server_app

    __all__ = ["client_app", "server_app"]

The server's folder is `trilemma-folder` in the run's configuration, a client's in its SuperNode's; the run's
name is `trilemma-run` ("default" without one). Flower starts a client's app anew for every message. So what a
client is lives in a process of its owner's, which stays, and to which the app passes what comes:

    python -m trilemma.flower FOLDER

Everything else is as without Flower: whom a client counts on, what its owner allows and what it pays stand in
its own folder.

**Who sits at a node** is not believed to Flower. The server sends a nonce; the client signs it, with the node
and the run that it is in, by the identity that the roster has. Who relays a nonce gets a signature over its
own node.

**What is trusted.** Flower's server delivers code to its clients and could deliver other code than this. So
there is no guarantee against a malicious server, whatever the threat model says; a client's ledger says so.

It needs the extra: `pip install 'trilemma[flower]'`. The carrier that needs no trust is our own over gRPC.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import TYPE_CHECKING

from trilemma.base import files
from trilemma.base.errors import PrivacyError, UserError
from trilemma.federation.identity.signed_files import canonical
from trilemma.federation.party.layout import PROCESS, Party
from trilemma.federation.processes.door import short
from trilemma.federation.processes.logs import keep_log, listener
from trilemma.federation.protocol.reasons import Refused, what_travels
from trilemma.federation.protocol.transport import FIRST_NODE, Reply
from trilemma.privacy.secrets import Identity, Roster, check_signature

if TYPE_CHECKING:
    from trilemma.federation.client.node import Node

try:
    from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise UserError(f"Flower is missing: pip install 'trilemma[flower]' ({error})") from None

FOLDER, RUN = "trilemma-folder", "trilemma-run"
"""Where a party's folder is, and what the run is called, in Flower's configurations."""

RECORD = "trilemma"
"""The record that a message has: a `nonce` or a `block`; its reply: `client` and `signature`, a `block`, or
`refused`."""

DELIVERED = "Flower's server delivers code to its clients"
"""Why a client's ledger says of every run that Flower carried that its server is trusted."""

HELLO_SECONDS = 30.0
"""After so long a node that has not said who it is is asked again."""

server_app, client_app = ServerApp(), ClientApp()


# --- the server -------------------------------------------------------------------------------------------


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation's configuration, from where it stands."""
    from trilemma.federation.server.coordinator import (
        open_run,  # and torch, which a client's app can do without
    )

    party, run = Party.open(_folder(context.run_config)), str(context.run_config.get(RUN, "default"))
    carrier = OverGrid(grid, context.run_id, lambda: party.keys)
    open_run(party, run, carrier, listener(party, run)).go()


@dataclass(frozen=True)
class _Hello:
    """A nonce that was sent to a node."""

    node: int
    nonce: bytes
    sent: float


class OverGrid:
    """A `Transport` over Flower's grid, in the run `run_id`, for those on the roster.

    Nodes have the numbers of their clients, as over every carrier: Flower's own change when a SuperNode
    starts again.
    """

    def __init__(
        self, grid: Grid, run_id: int, roster: Callable[[], Roster], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._grid, self._run_id, self._roster, self._now = grid, run_id, roster, now
        self._hellos: dict[str, _Hello] = {}
        self._proven: dict[int, tuple[int, bytes]] = {}
        self._at: dict[int, int] = {}
        self._asked: dict[str, tuple[int, int]] = {}

    def nodes(self) -> Mapping[int, int]:
        """Return the nodes that have proven whose they are, and the clients they are by the roster of now."""
        here, roster = set(self._grid.get_node_ids()), self._roster()
        self._hear_hellos(roster)
        self._proven = {
            node: (client, key)
            for node, (client, key) in self._proven.items()
            if node in here and client in roster.members and roster.key(client) == key
        }
        # A SuperNode that started again is another node, and the former one may still be listed.
        self._at = {FIRST_NODE + client: node for node, (client, _) in self._proven.items()}
        self._say_hello(here - self._proven.keys())
        return {number: number - FIRST_NODE for number in sorted(self._at)}

    def send(self, blocks: Mapping[int, bytes], lifetime: float) -> Mapping[str, int]:
        """Send each node its block, to be forgotten after `lifetime` seconds."""
        asked = [(number, self._at[number]) for number in blocks if number in self._at]
        contents = [{"block": blocks[number]} for number, _ in asked]
        names = self._push([node for _, node in asked], contents, lifetime)
        taken = {name: one for name, one in zip(names, asked, strict=True) if name}
        self._asked |= taken
        return {name: number for name, (number, _) in taken.items()}

    def fetch(self, questions: Collection[str]) -> list[Reply]:
        """Return the replies that are there; what another node says to a question is none."""
        self._asked = {name: one for name, one in self._asked.items() if name in questions}
        found: list[Reply] = []
        for one in self._grid.pull_messages(list(self._asked)) if self._asked else ():
            name = one.metadata.reply_to_message_id
            number, node = self._asked.get(name, (0, 0))
            if name in self._asked and one.metadata.src_node_id == node:
                del self._asked[name]
                found.append(_reply(number, name, one))
        return found

    def _say_hello(self, nodes: Collection[int]) -> None:
        now = self._now()
        self._hellos = {name: one for name, one in self._hellos.items() if now - one.sent < HELLO_SECONDS}
        asked = {one.node for one in self._hellos.values()}
        new = [(node, secrets.token_bytes(32)) for node in sorted(nodes) if node not in asked]
        names = self._push([node for node, _ in new], [{"nonce": nonce} for _, nonce in new], HELLO_SECONDS)
        self._hellos |= {
            name: _Hello(node, nonce, now) for name, (node, nonce) in zip(names, new, strict=True) if name
        }

    def _hear_hellos(self, roster: Roster) -> None:
        """Note who sits at which node; whoever cannot prove it is nobody, and asked again later."""
        for one in self._grid.pull_messages(list(self._hellos)) if self._hellos else ():
            hello = self._hellos.get(one.metadata.reply_to_message_id)
            if hello is None or not one.has_content():
                continue
            try:
                said = one.content.config_records[RECORD]
                client, signature = said["client"], said["signature"]
                if type(client) is not int or not isinstance(signature, bytes):
                    continue
                key = roster.key(client)
                check_signature(key, statement(hello.node, self._run_id, hello.nonce), signature)
            except (KeyError, PrivacyError):
                continue
            self._proven.pop(hello.node, None)
            self._proven[hello.node] = (client, key)

    def _push(
        self, nodes: Collection[int], contents: Collection[Mapping[str, bytes]], lifetime: float
    ) -> list[str]:
        messages = [
            Message(
                RecordDict({RECORD: ConfigRecord(dict(content))}),
                node,
                MessageType.QUERY,
                ttl=max(1.0, lifetime),
            )
            for node, content in zip(nodes, contents, strict=True)
        ]
        return list(self._grid.push_messages(messages)) if messages else []


def _reply(number: int, name: str, message: Message) -> Reply:
    """Return a reply as the server knows it: a block, a refusal, or that nobody was reached."""
    if not message.has_content():
        return Reply(number, error=message.error.reason or "no reason", question=name)
    said: Mapping[str, object] = message.content.config_records.get(RECORD, {})
    block, refused = said.get("block"), said.get("refused")
    if isinstance(block, bytes):
        return Reply(number, block, question=name)
    why = refused if isinstance(refused, str) else "neither a block nor a reason"
    return Reply(number, error=why, refused=True, question=name)


# --- a client ---------------------------------------------------------------------------------------------


@client_app.query()
def answer(message: Message, context: Context) -> Message:
    """Say who sits at this node, or pass a block to the client's own process."""
    party, asked = Party.open(_folder(context.node_config)), message.content.config_records[RECORD]
    said: dict[str, bytes | str | int]
    if isinstance(nonce := asked.get("nonce"), bytes) and party.client is not None:
        signature = Identity.load(party.identity).sign(statement(context.node_id, context.run_id, nonce))
        said = {"client": party.client, "signature": signature}
    else:
        block = asked.get("block")
        told = passed(party, block if isinstance(block, bytes) else b"")
        said = {"block": told[1:]} if told[:1] == ANSWERED else {"refused": told[1:].decode(errors="replace")}
    return Message(RecordDict({RECORD: ConfigRecord(dict(said))}), reply_to=message)


ANSWERED, REFUSED = b"a", b"r"
"""What a client's process says first: then comes a block, or a reason."""


def passed(party: Party, block: bytes) -> bytes:
    """Return what the client's own process says to a block."""
    try:
        with _socket(party) as path, Client(path, "AF_UNIX") as line:
            line.send_bytes(block)
            return line.recv_bytes()
    except (OSError, EOFError) as error:
        start = f"python -m trilemma.flower {party.folder}"
        raise UserError(f"{party.name}: its own process does not answer ({error}): {start}") from None


def serve(folder: Path) -> None:
    """Be a client, until the process ends: one at a time works in a folder, whatever carries its messages."""
    from trilemma.federation.client.node import Node

    party = Party.open(folder)
    party.check()
    party.running.mkdir(exist_ok=True)
    taken = UserError(f"{party.name}: another process works in {party.folder}")
    with files.locked(party.running / f"{PROCESS}.lock", taken), _socket(party) as path:
        keep_log(party)
        node = Node(party, say=listener(party))
        Path(path).unlink(missing_ok=True)  # whoever had it is gone
        with Listener(path, "AF_UNIX") as door:
            while True:
                with door.accept() as line, contextlib.suppress(OSError, EOFError):  # it went away
                    line.send_bytes(answered(node, line.recv_bytes()))


def answered(node: Node, block: bytes) -> bytes:
    """Return what a client says to a block."""
    from trilemma.federation.client.spending import trusts_server
    from trilemma.federation.protocol.wire import together

    try:
        found = node.answer(block)
        trusts_server(node.party, DELIVERED)
    except (Refused, UserError, OSError) as error:
        return REFUSED + what_travels(error).encode()
    return ANSWERED + together(found)


@contextlib.contextmanager
def _socket(party: Party) -> Iterator[str]:
    """Give the path of a client's socket, in a folder that is its owner's alone."""
    folder = party.running / "flower"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    with short(folder) as path:
        yield str(path / "node")


# --- both -------------------------------------------------------------------------------------------------


def statement(node: int, run_id: int, nonce: bytes) -> bytes:
    """Return what a client signs to prove that it sits at a node of Flower's, in a run of Flower's."""
    return canonical({"says": "I sit at this node", "node": node, "run": run_id, "nonce": nonce.hex()})


def _folder(configuration: Mapping[str, object]) -> Path:
    """Return the party's folder that a configuration of Flower's names."""
    folder = configuration.get(FOLDER)
    if not isinstance(folder, str):
        raise UserError(f"Flower was not told where this party's folder is: give {FOLDER}")
    return Path(folder).resolve()


if __name__ == "__main__":
    try:
        serve(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
