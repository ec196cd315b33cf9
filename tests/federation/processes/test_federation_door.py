"""The operator's door: who may come in, what is said there, and how it is told who came."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
import tempfile

import pytest

from federation_harness import make, small_config
from trilemma.base.errors import UserError
from trilemma.federation.processes import door
from trilemma.federation.processes.door import Door, ServerAwayError, ask


@pytest.fixture
def server(tmp_path):
    """A server's folder whose path is too long for a socket's name."""
    party = make(tmp_path / ("a" * 120), 1, small_config(1, tolerate=0))[0]
    party.running.mkdir()
    return party


@pytest.fixture
def opened(server):
    def answer(question):
        if question["ask"] == "no":
            raise UserError("it is said why")
        yield from ({"number": number} for number in range(question["count"]))

    one = Door(server, answer)
    yield server
    one.close()


def test_a_question_has_its_answer_line_by_line(opened):
    assert list(ask(opened, ask="count", count=3)) == [{"number": 0}, {"number": 1}, {"number": 2}]
    with pytest.raises(UserError, match="it is said why"):
        list(ask(opened, ask="no"))


def test_nobody_else_can_even_see_it(opened):
    folder = opened.running / "door"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "door").stat().st_mode) == 0o600


def test_another_user_who_got_there_hears_nothing(opened, monkeypatch):
    monkeypatch.setattr(door, "peer_of", lambda line: os.geteuid() + 1)
    with pytest.raises(ServerAwayError):
        list(ask(opened, ask="count", count=3))


def test_the_system_says_who_is_there():
    here, other = socket.socketpair()
    with here, other:
        assert door.peer_of(here) == os.geteuid()


@pytest.mark.parametrize("said", [b"\n", b"[1]\n", b'{"ask": 1}\n', b"\xff\xfe\n", b"[" * 70_000 + b"\n"])
def test_gibberish_is_answered_and_costs_nobody_else(opened, said):
    with socket.socket(socket.AF_UNIX) as line, door.short(opened.running / "door") as folder:
        line.settimeout(30.0)
        line.connect(str(folder / "door"))
        line.sendall(said)
        assert b"refused" in line.recv(1000)
    assert list(ask(opened, ask="count", count=1)) == [{"number": 0}]


def test_who_says_nothing_takes_one_seat_of_many(opened):
    with contextlib.ExitStack() as silent:
        path = silent.enter_context(door.short(opened.running / "door")) / "door"
        for _ in range(door.MOST - 1):
            silent.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        assert list(ask(opened, ask="count", count=1)) == [{"number": 0}]


def test_it_stays_open_where_files_run_out_for_a_while(server, monkeypatch):
    refused = iter([OSError(errno.EMFILE, "Too many open files")] * 3)
    honest, asked = door.peer_of, Door(server, lambda _: iter([{"number": 0}]))

    def peer_of(line):
        if (error := next(refused, None)) is not None:
            raise error
        return honest(line)

    monkeypatch.setattr(door, "peer_of", peer_of)
    for _ in range(3):
        with pytest.raises(ServerAwayError):
            list(ask(server, 30.0, ask="count"))
    assert list(ask(server, 30.0, ask="count")) == [{"number": 0}]
    asked.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a short path needs a place for a link")
def test_it_needs_no_room_for_temporary_files(opened, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    assert list(ask(opened, ask="count", count=1)) == [{"number": 0}]


def test_nobody_there_is_said_with_what_to_do(server):
    with pytest.raises(ServerAwayError, match="start it with `trilemma federation up"):
        list(ask(server, ask="status"))
