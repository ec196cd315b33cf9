"""A federation's keys without its folders, and the two ends of the gRPC carrier on loopback."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import grpc

from trilemma.base.version import VERSION
from trilemma.federation.carriers.grpc import credentials, frames
from trilemma.federation.carriers.grpc.client import serve
from trilemma.federation.carriers.grpc.credentials import Limits, Tls
from trilemma.federation.carriers.grpc.server import GrpcServer
from trilemma.federation.identity import certificates
from trilemma.federation.protocol.transport import FIRST_NODE, Reply

SOON = 30.0
"""Seconds within which everything happens that a test waits for, also on a busy machine."""


def write(folder: Path, name: str, issued: certificates.Issued, authority: bytes) -> Tls:
    """Put a party's certificate where its carrier reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tls = Tls(folder / f"{name}.crt", folder / f"{name}.key", folder / f"{name}-ca.crt")
    for path, content in zip(
        (tls.certificate, tls.key, tls.authority), (issued.certificate, issued.key, authority), strict=True
    ):
        path.write_bytes(content)
    return tls


class Keys:
    """An authority, the server's certificate, and one for each client."""

    def __init__(self, folder: Path, clients: int = 1) -> None:
        self.folder = folder
        self.authority = certificates.new_authority("test")
        ca = self.authority.certificate
        self.server = write(folder, "server", certificates.issue_server(self.authority, ("127.0.0.1",)), ca)
        self.clients: dict[int, Tls] = {}
        self.roster: dict[str, int] = {}
        for client in range(clients):
            self.issue(client)

    def issue(self, client: int, **options: object) -> Tls:
        """Give a client a certificate, for a new key, and put it on the roster in place of the one before."""
        issued = certificates.issue_client(self.authority, f"client-{client}", **options)
        tls = write(self.folder, f"client-{client}", issued, self.authority.certificate)
        self.clients[client] = tls
        self.roster = {key: one for key, one in self.roster.items() if one != client}
        self.roster[certificates.key_digest(issued.certificate)] = client
        return tls


@contextlib.contextmanager
def open_server(keys: Keys, port: int = 0, limits: Limits | None = None) -> Iterator[GrpcServer]:
    """Open a server on loopback."""
    spool = keys.folder / "spool"
    with GrpcServer.open(("127.0.0.1", port), keys.server, lambda: keys.roster, spool, limits) as server:
        yield server


@contextlib.contextmanager
def client(
    tls: Tls, port: int, answer: Callable[[object], object] = bytes, **options: object
) -> Iterator[list[str]]:
    """Run a client; yield what it says."""
    stop, said = threading.Event(), []
    thread = threading.Thread(
        target=serve, args=(answer, f"127.0.0.1:{port}", tls, stop, said.append), kwargs=options, daemon=True
    )
    thread.start()
    try:
        yield said
    finally:
        stop.set()
        thread.join(SOON)
        assert not thread.is_alive(), "a client that is told to stop stops"


def until(server: GrpcServer, true: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        server.wait(0.05)


def there(server: GrpcServer, *clients: int) -> None:
    """Wait until these clients, and nobody else, are connected."""
    until(server, lambda: set(server.nodes().values()) == set(clients))


def ask(server: GrpcServer, blocks: dict[int, bytes], seconds: float = SOON) -> dict[int, Reply]:
    """Ask clients, and wait for all replies."""
    questions = server.send({FIRST_NODE + client: block for client, block in blocks.items()}, seconds)
    return collect(server, questions)


def collect(server: GrpcServer, questions: dict[str, int]) -> dict[int, Reply]:
    """Wait for the replies to questions."""
    found: dict[int, Reply] = {}

    def look() -> bool:
        found.update({reply.node - FIRST_NODE: reply for reply in server.fetch(list(questions))})
        return len(found) == len(questions)

    until(server, look)
    return found


@contextlib.contextmanager
def by_hand(keys: Keys, port: int, who: int) -> Iterator[tuple[Callable[[bytes], None], grpc.Call]]:
    """A client's stream, frame by frame: what is put is sent, what is got was received."""
    put: queue.Queue[bytes | None] = queue.Queue()
    address = f"127.0.0.1:{port}"
    options = credentials.client_options(address, SOON)
    said = ((credentials.VERSION, VERSION),)
    with grpc.secure_channel(address, credentials.client_credentials(keys.clients[who]), options) as channel:
        call = channel.stream_stream(f"/{credentials.SERVICE}/{credentials.CALL}")
        got = call(iter(put.get, None), metadata=said, timeout=SOON)
        yield put.put, got
        put.put(None)


def question(server: GrpcServer, got: Iterable[bytes], who: int = 1) -> tuple[bytes, dict[str, int]]:
    """Ask a client by hand; return the question's name, as it came."""
    names = server.send({FIRST_NODE + who: b"what"}, SOON)
    name = bytes.fromhex(next(iter(names)))
    while frames.decode(next(got)).question != name:
        pass
    return name, names
