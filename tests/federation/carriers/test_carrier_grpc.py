"""The gRPC carrier's two ends with each other: blocks of all lengths, lines that break, who is who."""

from __future__ import annotations

import os
import threading

import pytest
from carrier_harness import ask, client, collect, open_server, there, until

from trilemma.federation.carriers.grpc.frames import PIECE_BYTES
from trilemma.federation.carriers.grpc.outbox import Outbox
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.federation.protocol.transport import FIRST_NODE

LENGTHS = (0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17)


def echo(block):
    return bytes(block)


@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_of_all_lengths_come_as_they_were_sent(keys, length):
    block = os.urandom(length)
    with open_server(keys) as server, client(keys.clients[0], server.port, echo):
        there(server, 0)
        reply = ask(server, {0: block})[0]
        assert reply.block is not None
        assert reply.block[:] == block


def test_a_long_block_lies_in_a_file_at_both_ends(keys, tmp_path):
    block, spool, seen = os.urandom(17 << 20), tmp_path / "spool", []

    def answer(block):
        seen.extend(spool.glob("*"))
        return [memoryview(block)[:5], memoryview(block)[5:]]

    with open_server(keys) as server, client(keys.clients[0], server.port, answer, spool=spool):
        there(server, 0)
        reply = ask(server, {0: block})[0]
        assert reply.block[:] == block
        assert [path.stat().st_size for path in seen] == [len(block)]
        assert [path.stat().st_size for path in (keys.folder / "spool").glob("*/*")] == [len(block)]


def test_a_refusal_travels_as_its_code_and_other_failures_as_failed(keys):
    def answer(block):
        if block == b"pay":
            raise Refused(Reason.BUDGET, "ε would be 3.71")
        raise ValueError("patient 4711")

    with open_server(keys) as server, client(keys.clients[0], server.port, answer):
        there(server, 0)
        refused = ask(server, {0: b"pay"})[0]
        assert (refused.refused, refused.why) == (True, Reason.BUDGET.told)
        assert ask(server, {0: b"work"})[0].why == Reason.FAILED.told


def test_a_question_to_a_client_that_is_not_there_waits_for_it(keys):
    with open_server(keys) as server:
        questions = server.send({FIRST_NODE + 1: b"are you there?"}, 30)
        with client(keys.clients[1], server.port, echo):
            assert collect(server, questions)[1].block == b"are you there?"
        assert server.send({FIRST_NODE + 7: b"nobody has this place"}, 30) == {}


def test_a_client_that_is_removed_loses_its_stream_at_once(keys):
    with open_server(keys) as server, client(keys.clients[0], server.port, echo) as said:
        there(server, 0)
        keys.roster = {key: one for key, one in keys.roster.items() if one != 0}
        assert dict(server.nodes()) == {}
        until(server, lambda: any("roster" in line for line in said))


def test_a_renewed_certificate_opens_a_new_line(keys):
    with open_server(keys) as server, client(keys.clients[0], server.port, echo):
        there(server, 0)
        before = server.presence()[0]
        keys.issue(0)
        until(server, lambda: 0 in server.presence() and server.presence()[0].since > before.since)
        assert ask(server, {0: b"hello"})[0].block == b"hello"


def test_a_server_that_starts_again_finds_its_clients(keys):
    with open_server(keys) as server, client(keys.clients[0], server.port, echo):
        there(server, 0)
        port = server.port
        server.close()
        with open_server(keys, port) as again:
            there(again, 0)
            assert ask(again, {0: b"hello"})[0].block == b"hello"


def test_of_two_programs_with_one_certificate_the_later_one_is_asked(keys):
    with open_server(keys) as server, client(keys.clients[0], server.port, lambda _: b"first") as said:
        there(server, 0)
        with client(keys.clients[0], server.port, lambda _: b"second"):
            until(server, lambda: any("another program" in line for line in said))
            assert ask(server, {0: b"who?"})[0].block == b"second"


def test_what_nobody_waits_for_any_more_is_not_worked_on(keys, monkeypatch):
    forgotten, forget = [], Outbox.forget
    noting = lambda box, name: forgotten.append(name.hex()) or forget(box, name)  # noqa: E731
    monkeypatch.setattr(Outbox, "forget", noting)
    begun, go_on, worked = threading.Event(), threading.Event(), []

    def answer(block):
        worked.append(bytes(block))
        begun.set()
        go_on.wait(30)
        return b"done"

    with open_server(keys) as server, client(keys.clients[0], server.port, answer):
        there(server, 0)
        first = server.send({FIRST_NODE: b"one"}, 30)
        assert begun.wait(30)
        second = server.send({FIRST_NODE: b"two"}, 30)
        assert server.send({FIRST_NODE: b"two"}, 30) == {}, "it is open: a line loses nothing"
        third = server.send({FIRST_NODE: b"three"}, 30)
        server.fetch([*first, *third])
        third |= server.send({FIRST_NODE: bytes(2 * PIECE_BYTES)}, 30)
        until(server, lambda: forgotten.count(*second) == 2)  # at both ends
        go_on.set()
        done = []
        until(server, lambda: done.extend(server.fetch([*first, *third])) or len(done) == 3)
        assert worked == [b"one", b"three", bytes(2 * PIECE_BYTES)]
        assert server.fetch(list(second)) == []
