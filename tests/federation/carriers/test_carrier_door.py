"""The server's door, with real sockets: strangers get no further than the handshake, clients no further."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

import grpc
import psutil
import pytest
from carrier_harness import SOON, Keys, ask, by_hand, client, open_server, there, until, write

from trilemma.base.errors import UserError
from trilemma.base.version import VERSION
from trilemma.federation.carriers.grpc import client as clients
from trilemma.federation.carriers.grpc import credentials, frames
from trilemma.federation.carriers.grpc.client import TurnedAwayError, look
from trilemma.federation.carriers.grpc.credentials import Limits, Tls
from trilemma.federation.carriers.grpc.server import PAUSE, GrpcServer
from trilemma.federation.identity import certificates

SETTINGS, PING, HEADERS, RESET = 4, 6, 1, 3
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@contextlib.contextmanager
def raw(tls: Tls, port: int):
    """A TLS connection of somebody who speaks no gRPC, with a client's certificate."""
    context = ssl.create_default_context(cafile=str(tls.authority))
    context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols(["h2"])
    plain = socket.create_connection(("127.0.0.1", port), timeout=SOON)
    with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as line:
        yield line


def answers(server: GrpcServer, who: int = 0) -> bool:
    """Whether a client that is connected is asked and answers."""
    return ask(server, {who: b"hello"})[who].block == b"hello"


def growth() -> Callable[[], int]:
    """How many bytes this process takes more than now."""
    process = psutil.Process()
    before = process.memory_info().rss
    return lambda: process.memory_info().rss - before


def expired(keys: Keys) -> Tls:
    return keys.issue(1, until=dt.datetime.now(dt.UTC) - dt.timedelta(days=1))


def foreign(keys: Keys) -> Tls:
    other = certificates.issue_client(certificates.new_authority("test"), "client-1")
    return write(keys.folder, "foreign", other, keys.authority.certificate)


@pytest.mark.parametrize("stranger", [expired, foreign])
def test_a_stranger_gets_no_further_than_the_handshake(keys, stranger):
    tls = stranger(keys)
    with open_server(keys) as server, client(keys.clients[0], server.port):
        there(server, 0)
        with pytest.raises(OSError, match=r"."):
            clients.look(f"127.0.0.1:{server.port}", tls, 2.0)
        assert set(server.presence()) == {0}
        assert answers(server)


def test_without_a_certificate_nobody_gets_in(keys):
    with open_server(keys) as server, client(keys.clients[0], server.port):
        there(server, 0)
        authority = keys.clients[0].authority.read_bytes()
        with grpc.secure_channel(
            f"127.0.0.1:{server.port}", grpc.ssl_channel_credentials(authority)
        ) as channel:
            call = channel.unary_unary(f"/{credentials.SERVICE}/{credentials.CALL}")
            with pytest.raises(grpc.RpcError):
                call(b"hello", timeout=2.0)
        assert answers(server)


def test_a_client_reaches_one_method_and_no_other(keys):
    with open_server(keys) as server:
        with grpc.secure_channel(
            f"127.0.0.1:{server.port}", credentials.client_credentials(keys.clients[0])
        ) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/trilemma.Federation/Unregister")(b"", timeout=SOON)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not server.presence()


def test_a_client_that_comes_too_often_waits(keys):
    with open_server(keys, limits=Limits(arrivals=3)) as server, client(keys.clients[1], server.port):
        there(server, 1)
        address = f"127.0.0.1:{server.port}"
        for _ in range(3):
            clients.look(address, keys.clients[0])
        with pytest.raises(clients.TurnedAwayError, match="comes too often"):
            clients.look(address, keys.clients[0])
        assert server.turned_away() == {0: "this client comes too often"}
        assert answers(server, 1), "each identity has a rate of its own"


def test_silent_connections_keep_nobody_out_for_long(keys):
    """All seats are taken by sockets that say nothing; each has the handshake's limit, and no more."""
    limits = Limits(connections=20, handshake=1.0)
    with open_server(keys, limits=limits) as server, client(keys.clients[0], server.port):
        there(server, 0)
        with contextlib.ExitStack() as mob:
            for _ in range(60):
                with contextlib.suppress(OSError):
                    mob.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=SOON))
            assert answers(server)
            with client(keys.clients[1], server.port):
                there(server, 0, 1)
                assert answers(server, 1)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 4000, b"\0" * 9])
def test_bytes_of_any_kind_do_no_harm(keys, garbage):
    with open_server(keys) as server, client(keys.clients[0], server.port):
        there(server, 0)
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", server.port), timeout=SOON) as line:
                line.sendall(garbage)
        with raw(keys.clients[1], server.port) as line, contextlib.suppress(OSError):
            line.sendall(garbage * 10)
            while line.recv(4096):
                pass
        assert answers(server)


@pytest.mark.parametrize(
    "flood",
    [
        lambda number: frame(PING, 0, os.urandom(8)),
        lambda number: frame(SETTINGS, 0),
        lambda number: frame(HEADERS, 2 * number + 1, b"\x82", 4) + frame(RESET, 2 * number + 1, bytes(4)),
        lambda number: frame(HEADERS, 1, b"\x82") if not number else frame(9, 1, b"\0" * 4000),
    ],
    ids=["ping", "settings", "rapid reset", "continuation"],
)
def test_floods_of_http2_cost_their_sender_its_connection(keys, flood):
    """By a client of the federation itself: nobody else gets that far. The others are answered meanwhile."""
    with open_server(keys) as server, client(keys.clients[0], server.port):
        there(server, 0)
        assert answers(server)
        grown, stop = growth(), threading.Event()

        def pour() -> None:
            with raw(keys.clients[1], server.port) as line, contextlib.suppress(OSError):
                line.sendall(PREFACE + frame(SETTINGS, 0))
                line.settimeout(1.0)
                for number in range(20_000):
                    if stop.is_set():
                        return
                    line.sendall(flood(number))

        pouring = threading.Thread(target=pour)
        pouring.start()
        try:
            deadline = time.monotonic() + 3.0
            while pouring.is_alive() and time.monotonic() < deadline:
                assert answers(server)
        finally:
            stop.set()
            pouring.join(SOON)
        assert not pouring.is_alive()
        assert grown() < 60e6
        assert answers(server)


def test_an_answer_that_is_too_long_is_refused_when_it_is_announced(keys):
    with open_server(keys) as server, client(keys.clients[0], server.port, lambda _: bytes(3 << 20)):
        server.longest = 1 << 20
        there(server, 0)
        reply = ask(server, {0: b"much"})[0]
        assert (reply.refused, "at most 1048576 are allowed" in reply.error) == (True, True)
        until(server, lambda: 0 in server.presence())


@pytest.mark.parametrize("kind", [frames.HAVE, frames.PIECE, frames.BEGIN, frames.REFUSED])
def test_who_answers_what_nobody_asked_is_shown_out(keys, kind):
    """Another round's answer, another client's, one that was never asked for, ten thousand times."""
    with open_server(keys) as server, client(keys.clients[0], server.port):
        with by_hand(keys, server.port, 1) as (put, got):
            there(server, 0, 1)
            for number in range(10_000):
                put(frames.encode(kind, number.to_bytes(16, "big"), 0))
            with pytest.raises(grpc.RpcError, match=r"nobody asked for|does not read"):
                for _ in got:
                    pass
        assert answers(server)


def test_a_body_of_two_gigabytes_is_refused_by_its_length(keys):
    literal = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"https"),
            (b":path", f"/{credentials.SERVICE}/{credentials.CALL}".encode()),
            (b":authority", b"127.0.0.1"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (credentials.VERSION.encode(), VERSION.encode()),
        )
    )
    with open_server(keys) as server, client(keys.clients[0], server.port):
        there(server, 0)
        grown = growth()
        with raw(keys.clients[1], server.port) as line, contextlib.suppress(OSError):
            line.sendall(PREFACE + frame(SETTINGS, 0) + frame(HEADERS, 1, literal, 4))
            line.sendall(frame(0, 1, b"\0" + (2**31 - 1).to_bytes(4, "big") + bytes(8000)))
            line.settimeout(2.0)
            for _ in range(2000):
                line.sendall(frame(0, 1, bytes(16_000)))
        until(server, lambda: set(server.presence()) == {0})
        assert grown() < 60e6
        assert answers(server)


def test_two_servers_do_not_share_a_port(keys):
    with open_server(keys) as server, pytest.raises(UserError, match="another program has it"):
        open_server(keys, port=server.port).__enter__()


def test_who_is_not_let_in_does_not_keep_the_server_busy(keys):
    """A client that was removed has a certificate for a while, and may ask as often as it likes."""
    with open_server(keys) as server:
        keys.roster = {}
        began = time.monotonic()
        for _ in range(4):
            with pytest.raises(TurnedAwayError, match="not on the federation's roster"):
                look(f"127.0.0.1:{server.port}", keys.clients[0])
        assert time.monotonic() - began > 4 * PAUSE


def test_memory_of_a_flood_comes_back(keys):
    """Silent connections, four times as many as there are seats; each takes a fifth of a megabyte."""
    grown = growth()
    with open_server(keys, limits=Limits(handshake=2.0)) as server, client(keys.clients[0], server.port):
        there(server, 0)
        with contextlib.ExitStack() as mob, selectors.DefaultSelector() as left:
            for _ in range(4 * server._limits.connections):
                line = mob.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=SOON))
                left.register(line, selectors.EVENT_READ)
            while left.get_map():  # until all were sent away
                assert answers(server)
                assert grown() < 60e6
                for key, _ in left.select(0.1):
                    left.unregister(key.fileobj)
        until(server, lambda: grown() < 20e6)
        assert answers(server)


def test_a_client_that_a_flood_kept_out_is_back_within_a_handshakes_limit():
    assert Limits().handshake >= 1.5 * clients.LATEST


def test_there_are_seats_for_a_large_federation(keys):
    keys.roster |= {f"{client:064x}": client for client in range(10, 1000)}
    with open_server(keys) as server:
        assert server._limits.connections >= 2 * len(keys.roster)
