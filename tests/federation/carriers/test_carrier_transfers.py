"""Blocks in pieces: broken off and continued, damaged, announced by liars."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading

import grpc
import pytest
from carrier_harness import ask, by_hand, client, collect, open_server, question, there
from hypothesis import given
from hypothesis import strategies as st

from trilemma.federation.carriers.grpc import client as carrier
from trilemma.federation.carriers.grpc import frames, transfers
from trilemma.federation.carriers.grpc.frames import PIECE_BYTES, BadFrameError
from trilemma.federation.carriers.grpc.outbox import Outbox
from trilemma.federation.carriers.grpc.transfers import DescribedBlock, Incoming, Outgoing
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.federation.protocol.transport import FIRST_NODE

LONG = transfers.IN_MEMORY + PIECE_BYTES + 17


@given(st.data())
def test_pieces_in_any_order_and_number_give_the_block_or_nothing(tmp_path_factory, data):
    """Repeated, out of turn, changed, cut off by a crash: what is complete is what was announced."""
    small, path = 64, tmp_path_factory.mktemp("pieces") / "block"
    block = data.draw(st.binary(min_size=1, max_size=5 * small))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "PIECE_BYTES", small)
        described = DescribedBlock.of(block)
        incoming = Incoming(described.length, described.digest, path)
        for place in data.draw(st.lists(st.integers(0, described.pieces), max_size=30)):
            crash = data.draw(st.integers(0, 9))
            if crash == 0:  # the process ends, and the disk keeps what it likes
                content = path.read_bytes()
                path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
                incoming = Incoming(described.length, described.digest, path)
            frame = frames.decode(Outgoing(bytes(16), described, next=place).piece())
            if crash == 1:
                changed = [bytes(len(frame.payload))]
                frame = frames.decode(frames.encode(frames.PIECE, bytes(16), place, changed))
            with contextlib.suppress(BadFrameError):
                incoming.take(frame)
        if incoming.complete:
            assert incoming.whole()[:] == block


@pytest.mark.parametrize("damaged", [False, True])
def test_an_answer_goes_on_where_it_stopped_when_the_server_dies(keys, monkeypatch, damaged):
    """Unless the disk made something else of what was there."""
    block, places, dies, take = os.urandom(LONG), [], threading.Event(), Incoming.take

    def taking(one, frame):
        if frame.number == 3 and not dies.is_set():
            dies.set()
        if dies.is_set() and server is not again:
            raise grpc.RpcError
        places.append(frame.number)
        return take(one, frame)

    monkeypatch.setattr(Incoming, "take", taking)
    again = None
    with open_server(keys) as server, client(keys.clients[0], server.port, lambda _: block):
        there(server, 0)
        server.send({FIRST_NODE: b"work"}, 60)
        assert dies.wait(30)
        port = server.port
        server.close()
        (path,) = (keys.folder / "spool" / "0").iterdir()
        assert path.stat().st_size == 3 * PIECE_BYTES
        if damaged:
            path.write_bytes(bytes(path.stat().st_size))
        del places[:]
        with open_server(keys, port) as again:
            server = again
            there(again, 0)
            assert ask(again, {0: b"work"})[0].block[:] == block
    assert places[0] == 3, "what had come is not sent again"
    assert (0 in places) == damaged


BLOCK = DescribedBlock.of(bytes(3 * PIECE_BYTES))


def begun(name, length, digest, content=b""):
    return frames.encode(frames.BEGIN, name, length, [frames.beginning(digest, 0.0), content])


def piece(name, place, content):
    return frames.encode(frames.PIECE, name, place, [content])


LIES = {
    "endless": lambda name: [begun(name, 1 << 50, bytes(32))],
    "another": lambda name: [begun(name, 5, bytes(32), b"12345")],
    "a piece of nothing": lambda name: [piece(name, 0, bytes(PIECE_BYTES))],
    "forgets": lambda name: [frames.encode(frames.FORGET, name)],
    "short pieces": lambda name: [begun(name, BLOCK.length, BLOCK.digest), piece(name, 0, b"short")],
    "other pieces": lambda name: [
        begun(name, BLOCK.length, BLOCK.digest),
        *(piece(name, place % 3, b"x" * PIECE_BYTES) for place in range(12)),
    ],
    "out of order": lambda name: [
        begun(name, BLOCK.length, BLOCK.digest),
        *[piece(name, 2, bytes(PIECE_BYTES))] * (transfers.STRAY + 1),
    ],
    "broken pieces": lambda name: [
        begun(name, BLOCK.length, BLOCK.digest),
        *[frames.encode(frames.PIECE, name, 0, [b"x"])[:29] + bytes(PIECE_BYTES)] * 4,
    ],
}


@pytest.mark.parametrize("how", LIES)
def test_a_liar_in_the_carrying_is_told_so_and_keeps_nobody_waiting(keys, how):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(open_server(keys))
        stack.enter_context(client(keys.clients[1], server.port, bytes))
        put, got = stack.enter_context(by_hand(keys, server.port, 0))
        there(server, 0, 1)
        names = server.send({FIRST_NODE: b"work", FIRST_NODE + 1: b"work"}, 60)
        name = frames.decode(next(got)).question
        for frame in LIES[how](name):
            put(frame)
        replies = collect(server, names)
        assert replies[0].refused
        assert replies[0].error.startswith("block")
        assert replies[1].block == b"work"


@pytest.mark.parametrize("kind", [frames.BEGIN, frames.HAVE])
def test_who_says_the_same_again_and_again_is_shown_out(keys, kind):
    with open_server(keys) as server, by_hand(keys, server.port, 0) as (put, got):
        there(server, 0)
        name, _ = question(server, got, 0)
        for number in range(1000):
            digest = number.to_bytes(32, "big")
            put(frames.encode(kind, name) if kind == frames.HAVE else begun(name, 2 * PIECE_BYTES, digest))
        with pytest.raises(grpc.RpcError, match="again and again"):
            list(got)


def test_an_answer_that_is_looked_at_stays_as_it_is(keys):
    """Who has a file mapped dies where it is cut off: what is announced later is another file."""
    block = DescribedBlock.of(os.urandom(LONG))
    with open_server(keys) as server, by_hand(keys, server.port, 0) as (put, got):
        there(server, 0)

        def begin(length):
            name, names = question(server, got, 0)
            put(begun(name, length, block.digest))
            while (frame := frames.decode(next(got))).kind != frames.HAVE:
                pass
            return name, names, frame.number

        name, names, _ = begin(LONG)
        for place in range(block.pieces):
            put(piece(name, place, b"".join(block.piece(place))))
        reply = collect(server, names)[0]
        assert begin(transfers.IN_MEMORY + 1)[2] == 0
        assert hashlib.sha256(reply.block).digest() == block.digest


def test_a_question_is_judged_by_its_length_before_anything_of_it_is_stored(keys, tmp_path):
    def check_length(length):
        if length > LONG:
            raise Refused(Reason.BLOCK)

    options = {"spool": tmp_path / "spool", "check_length": check_length}
    with open_server(keys) as server, client(keys.clients[0], server.port, bytes, **options):
        there(server, 0)
        assert ask(server, {0: bytes(LONG + 1)})[0].why == Reason.BLOCK.told
        assert not list(tmp_path.glob("spool/*"))
        assert len(ask(server, {0: bytes(LONG)})[0].block) == LONG


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_what_nobody_waits_for_any_more_leaves_room(seconds):
    """A server that died does not say what it has forgotten: a client does not count that for ever."""
    one = carrier._Client(bytes, None, lambda _: None, threading.Event(), str)
    complaint = pytest.raises(BadFrameError, match="questions open")
    with complaint if seconds else contextlib.nullcontext():
        for number in range(carrier.MOST + 1):
            question = Outgoing(bytes([number] * 16), DescribedBlock.of(b"work"), lifetime=seconds)
            one._take(Outbox(), frames.decode(question.begin()))
