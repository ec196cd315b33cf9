"""The server's door, in front of a SuperLink that is not one: what passes, and what never arrives there."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import socket
import ssl
import subprocess
import sys
import time
from asyncio import sslproto
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import psutil
import pytest
from flower_harness import wait_for
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
from hypothesis import given
from hypothesis import strategies as st

from free_ports import free_ports
from trilemma.federation import certificates, peers
from trilemma.federation.events import CONNECTION_CLOSED, Event
from trilemma.federation.facts import FACTS, Facts
from trilemma.flower import conversation, guard, replies, tidying
from trilemma.flower.announcements import records_announced
from trilemma.flower.bell import Bell
from trilemma.flower.guard import Guard
from trilemma.flower.limits import ANNOUNCES, PATHS, SMALL, UPLOADS, Limits, Settings
from trilemma.flower.lines import Line
from trilemma.flower.lost_answers import LostAnswers
from trilemma.flower.meters import Tokens
from trilemma.flower.tidying import Tidying
from trilemma.flower.waiting import Waiting

PULL = "/v1/fleet/pull-messages"
KEY = "a-node-key"
MEGABYTE = 1 << 20
LIMITS = Limits(message=1_000_000, head_seconds=60.0, idle_seconds=60.0)
HASTY = replace(LIMITS, head_seconds=0.3, idle_seconds=0.3)
"""With these a door sends people away, and on a busy machine some who do nothing wrong."""


@dataclass
class Link:
    """What stands behind the guard: it remembers what arrived and answers with what it is told to."""

    status: int = 200
    body: bytes = b"answer"
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    connections: int = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")
                )
                self.seen.append((head.split()[1], await reader.readexactly(length)))
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (self.status, len(self.body)))
                writer.write(self.body)
                await writer.drain()


@dataclass
class Door:
    """A guard at work, the link behind it, and certificates to come with."""

    folder: Path
    port: int
    link: Link
    settings: Settings
    file: Path
    said: list[Event]

    def context(self, who: str | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.folder / "ca.crt")
        if who is not None:
            context.load_cert_chain(self.folder / f"{who}.crt", self.folder / f"{who}.key")
        return context

    async def connect(self, who: str | None = "client-0", source: str = "127.0.0.1"):
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.context(who), server_hostname="localhost", local_addr=(source, 0)
        )

    async def say(self, raw: bytes, who: str | None = "client-0") -> bytes:
        """Send these bytes and return all that comes back until the door closes or nothing comes any more."""
        reader, writer = await self.connect(who)
        try:
            writer.write(raw)
            await writer.drain()
            return await hear(reader)
        finally:
            writer.transport.abort()

    async def lets_in(self, source: str) -> bool:
        """Whether a client gets past the handshake from an address."""
        try:
            _, writer = await self.connect("client-1", source)
        except (OSError, ssl.SSLError):
            return False
        writer.transport.abort()
        return True

    async def works(self) -> bool:
        return (await self.say(request(PULL))).startswith(b"HTTP/1.1 200")

    async def works_at_last(self) -> None:
        """Wait until somebody is quick enough for a hasty door."""
        while True:
            with contextlib.suppress(OSError):
                if await self.works():
                    return


async def hear(reader, seconds: float = 120.0) -> bytes:
    heard = b""
    with contextlib.suppress(TimeoutError, ConnectionError, ssl.SSLError):
        async with asyncio.timeout(seconds):
            while piece := await reader.read(1 << 16):
                heard += piece
                if b"\r\n\r\n" in heard and complete(heard):
                    break
    return heard


def complete(heard: bytes) -> bool:
    head, _, body = heard.partition(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(lengths) and len(body) >= lengths[0]


def request(path: str, body: bytes = b"body", **heads: str) -> bytes:
    told = {"host": "server", "content-length": str(len(body)), "flwr-public-key": KEY}
    told |= {name.replace("_", "-"): value for name, value in heads.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items() if value)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An authority, the server's certificate, two clients', a stranger's, and one of another authority."""
    folder = tmp_path_factory.mktemp("door")
    authority, other = certificates.new_authority("pilot"), certificates.new_authority("pilot")
    issued = {
        "server": certificates.issue_server(authority, ("127.0.0.1",)),
        "client-0": certificates.issue_client(authority, "client-0"),
        "client-1": certificates.issue_client(authority, "client-1"),
        "stranger": certificates.issue_client(authority, "stranger"),
        "foreigner": certificates.issue_client(other, "client-0"),
    }
    (folder / "ca.crt").write_bytes(authority.certificate)
    for name, one in issued.items():
        (folder / f"{name}.crt").write_bytes(one.certificate)
        (folder / f"{name}.key").write_bytes(one.key)
    return folder


@contextlib.asynccontextmanager
async def opened(
    folder: Path,
    limits: Limits = LIMITS,
    away: bool = False,
    seen: Path | None = None,
    bell: Bell | None = None,
):
    """Put a guard in front of a link, for a while."""
    link, context = Link(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    behind = await asyncio.start_server(link, "127.0.0.1", 0, ssl=context)
    listener = socket.create_server(("127.0.0.1", 0))
    settings = Settings(
        *("127.0.0.1", listener.getsockname()[1], behind.sockets[0].getsockname()[1]),
        *(str(folder / name) for name in ("ca.crt", "server.crt", "server.key")),
        peers={"client-0": KEY, "client-1": "another"},
        limits=limits,
        folder=str(folder),
    )
    if away:
        behind.close()
    said: list[Event] = []
    file = folder / f"settings-{settings.port}"
    settings.save(file)
    guarding = asyncio.create_task(Guard(settings, file, said.append, seen, bell).serve(listener))
    try:
        yield Door(folder, settings.port, link, settings, file, said)
    finally:
        guarding.cancel()
        behind.close()
        listener.close()
        with contextlib.suppress(asyncio.CancelledError):
            await guarding


def guarded(folder, scene, limits=LIMITS, **options):
    """Run `scene(door)`."""

    async def play():
        async with opened(folder, limits, **options) as door:
            async with asyncio.timeout(240):
                return await scene(door)

    return asyncio.run(play())


# --- what passes ------------------------------------------------------------------------------------------


def test_clients_come_and_go_while_the_door_is_open(folder):
    """Who was removed is refused on the connection it has; settings that cannot be read change nothing."""

    async def scene(door):
        mine = request(PULL, flwr_public_key="another")
        reader, writer = await door.connect("client-1")
        writer.write(mine)
        assert (await hear(reader)).startswith(b"HTTP/1.1 200")
        assert await door.say(request(PULL), "stranger") == b""
        replace(door.settings, peers={"client-0": KEY, "stranger": KEY}).save(door.file)
        writer.write(mine)
        assert (await hear(reader)).startswith(b"HTTP/1.1 403")
        writer.transport.abort()
        assert await door.say(mine, "client-1") == b""
        assert (await door.say(request(PULL), "stranger")).startswith(b"HTTP/1.1 200")
        door.file.write_text("gibberish")
        assert await door.works()

    guarded(folder, scene)


def test_what_clients_need_passes_unchanged(folder):
    async def scene(door):
        door.link.body = bytes(range(256)) * 20_000
        upload = bytes(reversed(range(256))) * 4000
        reader, writer = await door.connect()
        for path in sorted(PATHS - {ANNOUNCES, UPLOADS}):
            writer.write(request(path, path.encode()))
            assert (await hear(reader)).endswith(door.link.body)
        writer.write(request(UPLOADS, upload))
        assert (await hear(reader)).endswith(door.link.body)
        writer.write(request(ANNOUNCES, announcement(3)))
        assert (await hear(reader)).endswith(door.link.body)
        writer.transport.abort()
        small = [(path, path.encode()) for path in sorted(PATHS - {ANNOUNCES, UPLOADS})]
        assert door.link.seen == [*small, (UPLOADS, upload), (ANNOUNCES, announcement(3))]
        assert door.link.connections == 1, "one connection behind each in front, used again"

    guarded(folder, scene)


# --- who is let in ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [None, "foreigner", "server", "stranger"])
def test_nobody_else_gets_in(folder, who):
    """No certificate, another authority's, the server's own, and one of ours under a name nobody has."""

    async def scene(door):
        heard = b""
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            heard = await door.say(request(PULL), who)
        assert heard == b""
        assert door.link.connections == 0
        assert await door.works()

    guarded(folder, scene)


def test_a_certificate_goes_with_its_own_node_key(folder):
    async def scene(door):
        assert b" 400 " in await door.say(request(PULL), "client-1")
        assert b" 400 " in await door.say(request(PULL, flwr_public_key=""))
        twice = request(PULL).replace(b"host: server", b"host: server\r\nflwr-public-key: another")
        assert b" 400 " in await door.say(twice)
        assert door.link.seen == []

    guarded(folder, scene)


# --- what is refused --------------------------------------------------------------------------------------

ELSEWHERE = [
    "/v1/control/start-run",
    "/v1/control/list-nodes",
    "/v1/runtime/acquire-task",
    "/v1/fleet/register-node",
    "/v1/fleet/unregister-node",
    "/v1/fleet/pull-messages?x=1",
    "/v1/fleet/../control/start-run",
    "//v1/fleet/pull-messages",
    "https://server/v1/fleet/pull-messages",
    "/",
    "/docs",
]


def test_other_requests_are_refused(folder):
    async def scene(door):
        for path in ELSEWHERE:
            assert (await door.say(request(path))).startswith(b"HTTP/1.1 404"), path
        for method in (b"GET", b"PUT", b"OPTIONS"):
            assert (await door.say(request(PULL).replace(b"POST", method))).startswith(b"HTTP/1.1 404")
        assert door.link.connections == 0

    guarded(folder, scene)


@pytest.mark.parametrize(
    ("path", "heads", "status"),
    [
        (UPLOADS, {"content_length": "2000000000"}, 413),
        (UPLOADS, {"content_length": str(LIMITS.largest(UPLOADS) + 1)}, 413),
        (PULL, {"content_length": str(SMALL + 1)}, 413),
        (PULL, {"content_length": "9" * 400}, 413),
        (PULL, {"content_length": "9" * 5000}, 413),
        (PULL, {"content_length": ""}, 411),
        (UPLOADS, {"content_length": "", "transfer_encoding": "chunked"}, 411),
        (UPLOADS, {"content_encoding": "gzip"}, 411),
        (UPLOADS, {"expect": "100-continue"}, 411),
    ],
)
def test_a_body_is_judged_by_its_head(folder, path, heads, status):
    """Nothing but the head was read, and nothing arrived."""

    async def scene(door):
        reader, writer = await door.connect()
        writer.write(request(path, b"", **heads))
        heard = await hear(reader)
        assert heard[9:12] in (str(status).encode(), b""), heard  # h11 itself closes on some of them
        assert door.link.connections == 0
        assert await door.works()

    guarded(folder, scene)


def test_a_message_may_be_a_tenth_longer_than_declared(folder):
    async def scene(door):
        assert (await door.say(request(UPLOADS, b"x" * 1_100_000))).startswith(b"HTTP/1.1 200")
        assert (await door.say(request(UPLOADS, b"x" * 1_102_000))).startswith(b"HTTP/1.1 413")
        assert [len(body) for _, body in door.link.seen] == [1_100_000]

    guarded(folder, scene)


def announcement(records: int, reply: str = "b" * 64, root: str | None = None, first: int = 0) -> bytes:
    """What Flower's own client announces for a reply of so many records."""
    leaves = [ObjectTree(object_id=f"{number:08x}" * 8) for number in range(first, first + records - 1)]
    about = Metadata(message_id=reply, reply_to_message_id="a" * 64)
    return PushMessagesRequest(
        messages_list=[Message(metadata=about)],
        message_object_trees=[ObjectTree(object_id=reply if root is None else root, children=leaves)],
    ).SerializeToString()


async def announces(door: Door, *bodies: bytes) -> list[int]:
    """Return how each announcement is answered."""
    return [int((await door.say(request(ANNOUNCES, body)))[9:12]) for body in bodies]


@pytest.mark.parametrize("records", [9, 100, 20_000])
def test_a_reply_of_many_records_is_refused_before_it_is_stored(folder, records):
    async def scene(door):
        assert await announces(door, announcement(records), b"\xff" * 50) == [413, 400]
        assert door.link.seen == []
        assert await announces(door, announcement(8)) == [200]

    guarded(folder, scene)


def test_a_client_says_nothing_in_the_servers_name(folder):
    """A message that answers none is a question to Flower's SuperLink, which keeps it for whom it names."""

    def said(*answered: str) -> bytes:
        about = [
            Metadata(reply_to_message_id=one, message_id="b" * 64).SerializeToString() for one in answered
        ]
        message = b"".join(field_of(1, one) for one in about)
        return field_of(2, message) + field_of(3, ObjectTree(object_id="b" * 64).SerializeToString())

    async def scene(door):
        assert await announces(door, said(), said(""), said("a", ""), said("a", "b")) == 4 * [400]
        assert door.link.seen == []
        assert await announces(door, said("a" * 64)) == [200]

    guarded(folder, scene)


def field_of(number: int, data: bytes) -> bytes:
    """Bytes as protobuf writes them, in a field of a message."""
    length = [len(data) & 127 | 128, len(data) >> 7] if len(data) > 127 else [len(data)]
    return bytes([number << 3 | 2, *length]) + data


def test_a_reply_is_announced_with_its_own_records_and_always_the_same(folder):
    """The SuperLink stores other records under the id of a reply it has, and never forgets them."""
    honest = announcement(3)

    async def scene(door):
        assert await announces(door, honest, honest) == [200, 200]
        others = [announcement(3, first=first) for first in range(10, 15)]
        assert await announces(door, *others) == 5 * [409]
        foreign = [announcement(3, root="c" * 64), announcement(3, root=""), honest + honest, honest[:-1]]
        assert await announces(door, *foreign) == 4 * [400]
        assert [body for _, body in door.link.seen] == [honest, honest]
        assert await announces(door, announcement(3, reply="d" * 64)) == [200]

    guarded(folder, scene)


def test_a_question_allows_few_announcements(folder, monkeypatch):
    """Each is a line in the SuperLink's database, refused or not: one client is no reason for a full disk."""
    monkeypatch.setattr(replies, "MOST", 6)
    fresh = [announcement(3, reply=f"{number:064x}") for number in range(30)]

    async def scene(door):
        assert await announces(door, *fresh[:8]) == [200] * 6 + [503] * 2
        assert await door.works()  # and is asked something
        assert await announces(door, *fresh[8:14]) == [200] * 4 + [503] * 2
        assert len(door.link.seen) == 11

    guarded(folder, scene)


trees = st.recursive(
    st.builds(ObjectTree, object_id=st.text(max_size=5)),
    lambda inner: st.builds(ObjectTree, object_id=st.text(max_size=5), children=st.lists(inner, max_size=4)),
    max_leaves=20,
)


@given(st.lists(trees, max_size=3))
def test_records_are_counted_as_flower_counts_them(announced):
    def count(tree):
        return 1 + sum(map(count, tree.children))

    body = PushMessagesRequest(message_object_trees=announced).SerializeToString()
    assert records_announced(body) == sum(map(count, announced))


# --- who is slow, and who is many -------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", b"POST /v1/fl", request(UPLOADS, b"", content_length="1000") + b"x"])
def test_who_is_slow_is_sent_away(folder, start):
    """A handshake and nothing, half a head, half a body: each ends in time, and the door is free again."""

    async def scene(door):
        with contextlib.suppress(OSError):  # or it is sent away in the middle of the handshake
            reader, writer = await door.connect()
            writer.write(start)
            while not reader.at_eof():
                await reader.read(1000)
        assert door.link.seen == []
        await door.works_at_last()

    guarded(folder, scene, HASTY)


def test_half_open_connections_do_not_keep_others_out(folder):
    """Two hundred strangers say nothing from one address; a client comes from another."""
    limits = replace(LIMITS, strangers=20, head_seconds=5.0)

    async def scene(door):
        silent = [
            await asyncio.open_connection("127.0.0.1", door.port, local_addr=("127.0.0.2", 0))
            for _ in range(200)
        ]
        assert await door.works()
        for _, writer in silent:
            writer.transport.abort()

    guarded(folder, scene, limits)


def test_strangers_from_many_addresses_do_not_keep_a_client_out_that_was_here_before(folder):
    """They take every seat for strangers; where somebody has shown a certificate, there are others."""
    limits = replace(LIMITS, strangers=4, head_seconds=60.0)

    async def scene(door):
        assert await door.works()
        sources = [f"127.0.0.{number}" for number in range(2, 12) for _ in range(4)]
        silent = [
            await asyncio.open_connection("127.0.0.1", door.port, local_addr=(source, 0))
            for source in sources
        ]
        while not any("too many strangers" in event.text for event in door.said):
            await asyncio.sleep(0.01)
        assert not await door.lets_in("127.0.0.99")
        assert await door.works()
        for _, writer in silent:
            writer.transport.abort()

    guarded(folder, scene, limits)


def test_strangers_behind_a_clients_own_address_do_not_keep_it_out(folder):
    """They say nothing, and hold all seats of the address: whoever came first makes room for the newest."""
    limits = replace(LIMITS, strangers=4, head_seconds=60.0)

    async def scene(door):
        silent = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(10)]
        while sum("too many strangers" in event.text for event in door.said) < 6:
            await asyncio.sleep(0.01)
        assert await door.works()
        assert await silent[0][0].read() == b""  # the first was sent away, and not the last
        assert not silent[-1][0].at_eof()
        for _, writer in silent:
            writer.transport.abort()

    guarded(folder, scene, limits)


def left() -> int:
    """How many connections have remains in memory."""
    return sum(isinstance(one, sslproto.SSLProtocol) for one in gc.get_objects())


@contextlib.contextmanager
def uncollected():
    """Nothing is collected but by whoever asks for it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_what_is_left_of_connections_is_given_back(folder, monkeypatch):
    """Each has buffers as long as many requests, and refers to itself: nobody but a collector frees it."""
    monkeypatch.setattr(guard, "EVERY", 0.05)

    async def scene(door):
        before = left()
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.transport.abort()
        while left() > before:
            await asyncio.sleep(0.05)

    with uncollected():
        guarded(folder, scene)


def test_no_more_is_left_of_connections_however_many_come_in_a_moment(folder, monkeypatch):
    """The collector's own time does not come, as on a machine that is busy."""
    monkeypatch.setattr(guard, "EVERY", 1e6)

    async def scene(door):
        before, sources = left(), itertools.cycle(f"127.0.0.{number}" for number in range(2, 42))
        for _ in range(3 * tidying.MOST):
            _, writer = await asyncio.open_connection("127.0.0.1", door.port, local_addr=(next(sources), 0))
            writer.transport.abort()
        while left() - before > tidying.MOST:
            await asyncio.sleep(0.05)

    with uncollected():
        guarded(folder, scene)


@pytest.mark.skipif(Tidying()._trim is None, reason="this C library keeps what was freed")
def test_memory_of_strangers_goes_back_to_the_system(folder, tmp_path):
    """All seats are taken by people who say nothing, and are free again."""
    paths = (str(folder / name) for name in ("ca.crt", "server.crt", "server.key"))
    settings = Settings("127.0.0.1", free_ports(0), 1, *paths, peers={"client-0": KEY}, limits=LIMITS)
    settings.save(tmp_path / "settings")
    sources = [f"127.0.0.{number}" for number in range(2, 10) for _ in range(LIMITS.strangers)]
    program = [sys.executable, "-m", "trilemma.flower.guard", str(tmp_path / "settings")]
    with subprocess.Popen(program, stderr=subprocess.DEVNULL) as door:
        try:
            process, began = psutil.Process(door.pid), tmp_path / "events" / "guard.jsonl"
            wait_for(began.exists, 60.0)
            before = process.memory_info().rss
            there = (settings.listen, settings.port)
            silent = [socket.create_connection(there, source_address=(one, 0)) for one in sources]
            wait_for(lambda: process.memory_info().rss - before > 20 * MEGABYTE, 60.0)
            for one in silent:
                one.close()
            wait_for(lambda: process.memory_info().rss - before < 8 * MEGABYTE, 60.0)
        finally:
            door.kill()


def test_a_peer_has_so_many_connections_and_no_more(folder):
    limits = replace(LIMITS, connections=3)

    async def scene(door):
        held = [await door.connect() for _ in range(3)]
        while await door.say(request(PULL)):  # until the guard has counted the third
            pass
        held[0][1].transport.abort()
        while not await door.works():  # until it has noticed that one is gone
            pass
        for _, writer in held:
            writer.transport.abort()

    guarded(folder, scene, limits)


def test_a_peer_that_asks_too_often_waits_and_is_then_sent_away(folder, monkeypatch):
    monkeypatch.setattr(conversation, "LONGEST_WAIT", 1.0)

    now = [0.0]  # it is the same moment until told otherwise, however long a handshake takes
    monkeypatch.setattr(guard, "Tokens", partial(Tokens, now=lambda: now[0]))

    async def scene(door):
        since = time.monotonic()
        assert all([await door.works() for _ in range(4)])
        assert time.monotonic() - since >= 1.5, "two at once, one after half a second, one after a second"
        assert (await door.say(request(PULL))).startswith(b"HTTP/1.1 503")
        now[0] = 10.0
        assert await door.works()

    guarded(folder, scene, replace(LIMITS, rate=2.0, burst=2))


# --- the SuperLink ----------------------------------------------------------------------------------------


def test_a_superlink_that_is_away_or_fails_is_asked_again(folder):
    """A SuperNode gives up for ever on 500; on 503 it tries again."""

    async def failing(door):
        door.link.status = 500
        assert (await door.say(request(PULL))).startswith(b"HTTP/1.1 503")
        assert (await door.say(request(UPLOADS))).startswith(b"HTTP/1.1 500")

    async def away(door):
        assert (await door.say(request(PULL))).startswith(b"HTTP/1.1 503")

    guarded(folder, failing)
    guarded(folder, away, away=True)


@pytest.mark.slow
@given(
    st.lists(st.binary(max_size=400) | st.sampled_from([request(PULL), b"\r\n\r\n", b"POST "]), max_size=6)
)
def test_bytes_of_any_kind_do_no_harm(folder, pieces):
    """Whatever an authenticated client sends: the door stands, and only whole requests get through."""

    async def scene(door):
        with contextlib.suppress(OSError):
            await door.say(b"".join(pieces))
        assert all(path in PATHS for path, _ in door.link.seen)
        await door.works_at_last()

    guarded(folder, scene, replace(LIMITS, idle_seconds=0.1, head_seconds=0.1))


# --- what it sees -------------------------------------------------------------------------------------------


def test_the_guard_sees_who_asks_how_its_clock_goes_and_what_was_refused(folder, tmp_path):
    """What the server's operator is shown of a client is what the guard saw, and no more."""
    seen = tmp_path / "run" / "peers"

    async def scene(door):
        late = datetime.fromtimestamp(time.time() + 77, UTC).isoformat()
        await door.say(request(PULL, flwr_timestamp=late))
        await door.say(request("/v1/control/start-run"))
        await door.say(request(PULL, b"", content_length="999999"))
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            await door.say(request(PULL), who="foreigner")
        await becomes(lambda: (told := peers.Door.load(seen)) is not None and told.strangers == 1)
        return peers.Door.load(seen), [(one.code, one.facts) for one in door.said]

    door, said = guarded(folder, scene, seen=seen)
    peer = door.peers[0]
    assert peer.clock == pytest.approx(77, abs=30)
    assert peer.pulled == pytest.approx(time.time(), abs=120)
    assert (peer.requests, peer.received, peer.sent) == (1, 4, len(b"answer"))
    assert (peer.refused, door.strangers, door.peers[1]) == ({"404": 1, "413": 1}, 1, peers.Peer())
    assert [code for code, _ in said] == ["request-refused", "request-refused", "stranger-refused"]
    assert [facts.get("path") for _, facts in said[:2]] == ["other", PULL]


def test_who_is_let_in_may_compare_what_both_sides_have(folder, tmp_path):
    (folder / "config.toml").write_text("[run]")
    seen, mine = tmp_path / "peers", replace(Facts.in_folder(folder), roster="another", python="3.99")

    async def scene(door):
        told = await door.say(request(FACTS, json.dumps(mine.plain()).encode(), flwr_public_key=""))
        wrong = [b"no json", b"[]", b'{"config": "x"}', json.dumps({**mine.plain(), "more": "x"}).encode()]
        wrong += [json.dumps({**mine.plain(), "config": "x" * 99}).encode(), b"[" * 5000]
        answers = [await door.say(request(FACTS, body)) for body in wrong]
        await becomes(lambda: (door := peers.Door.load(seen)) is not None and door.peers[0].facts == mine)
        return told, answers, peers.Door.load(seen), door.link.seen

    told, answers, door, behind = guarded(folder, scene, seen=seen)
    answer = json.loads(told.partition(b"\r\n\r\n")[2])
    assert mine.differences(Facts.read(answer["facts"])) == {"roster": ("another", "missing")}
    assert answer["time"] == pytest.approx(time.time(), abs=120)
    assert all(one.startswith(b"HTTP/1.1 400") for one in answers)
    assert door.peers[0].facts == mine
    assert behind == [], "the SuperLink hears nothing of it"


# --- who waits --------------------------------------------------------------------------------------------


@pytest.fixture
def bell(tmp_path, monkeypatch):
    """A bell, and a guard that keeps clients waiting for longer than a test may last."""
    monkeypatch.setattr(Limits, "keeps_waiting", staticmethod(lambda peers: 600.0))
    return Bell(tmp_path / "bell")


async def becomes(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_a_client_that_found_nothing_waits_for_the_bell_and_nothing_is_overlooked(folder, bell):
    async def scene(door):
        door.link.body = b""
        assert await door.works(), "the first question is passed on"
        kept = asyncio.create_task(door.works())
        await asyncio.sleep(0.3)
        assert (len(door.link.seen), kept.done()) == (1, False)
        bell.ring()
        assert await kept
        assert len(door.link.seen) == 2
        door.link.body = b"a message"
        bell.ring()
        assert await door.works()
        await door.say(request("/v1/fleet/pull-object"))
        assert await door.works(), "who got something asks again at once: there may be more"
        await door.say(request("/v1/fleet/pull-object"))
        door.link.body = b""
        assert await door.works()
        bell.ring()  # between two questions
        assert await door.works()
        other = await door.say(request(PULL, flwr_public_key="another"), "client-1")
        assert other.startswith(b"HTTP/1.1 200"), "another client's luck is its own"
        assert [path for path, _ in door.link.seen].count(PULL) == 7

    guarded(folder, scene, bell=bell)


def test_a_client_that_went_away_while_it_waited_takes_no_message(folder, bell, monkeypatch):
    """A message that is handed out to nobody is lost until its node is started anew."""
    lines, kept, keep = [], [], Waiting.keep

    def remembered(*ends):
        lines.append(Line(*ends))
        return lines[-1]

    async def remember(self, name, limit):
        kept.append(name)
        await keep(self, name, limit)

    monkeypatch.setattr(guard, "Line", remembered)
    monkeypatch.setattr(Waiting, "keep", remember)

    async def scene(door):
        door.link.body = b""
        assert await door.works()
        _, writer = await door.connect()
        writer.write(request(PULL))
        await writer.drain()
        await becomes(lambda: len(kept) == 2)
        writer.transport.abort()
        await becomes(lambda: lines[-1].writer.is_closing())
        bell.ring()
        await becomes(lambda: any(one.kind is CONNECTION_CLOSED for one in door.said))
        assert len(door.link.seen) == 1

    guarded(folder, scene, bell=bell)


def test_a_client_is_not_kept_for_ever(folder, bell, monkeypatch):
    monkeypatch.setattr(Limits, "keeps_waiting", staticmethod(lambda peers: 0.1))

    async def scene(door):
        door.link.body = b""
        assert await door.works()
        assert await door.works()
        assert len(door.link.seen) == 2

    guarded(folder, scene, bell=bell)


# --- answers that are lost --------------------------------------------------------------------------------


def test_work_that_was_lost_on_the_way_is_handed_out_again(folder):
    """The SuperLink hands a message out once; a client that asks again without fetching it has not got it."""

    async def scene(door):
        door.link.body = b"a message"
        _, writer = await door.connect()
        writer.write(request(PULL))
        await writer.drain()
        await becomes(lambda: len(door.link.seen) == 1)
        writer.transport.abort()
        door.link.body = b""
        await door.say(request("/v1/fleet/send-node-heartbeat"))
        again = await door.say(request(PULL))
        assert again.endswith(b"a message")
        assert [path for path, _ in door.link.seen].count(PULL) == 1
        await door.say(request("/v1/fleet/pull-object"))
        assert (await door.say(request(PULL))).startswith(b"HTTP/1.1 200"), "it has it now"
        assert [path for path, _ in door.link.seen].count(PULL) == 2

    guarded(folder, scene)


def test_work_is_lost_more_than_once_and_is_not_kept_for_ever():
    now = [0.0]
    lost = LostAnswers(lambda: now[0])
    for _ in range(3):
        lost.answered("client-0", [], b"a message")
        assert lost.asked("client-0", PULL).body == b"a message"
        assert lost.asked("client-0", PULL) is None, "who was answered has it, until told otherwise"
    lost.answered("client-0", [], b"a message")
    now[0] += 91.0
    assert lost.asked("client-0", PULL) is None
    lost.answered("client-0", [], b"x" * 70_000)
    assert lost.asked("client-0", PULL) is None, "nobody's answer is so long"
