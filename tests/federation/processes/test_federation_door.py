"""The operator's door: who may come in, what is said there, and how it is told who came."""

from __future__ import annotations

import os
import socket
import stat

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
    with door.short(opened.running / "door") as folder:
        silent = [socket.socket(socket.AF_UNIX) for _ in range(door.MOST - 1)]
        for line in silent:
            line.connect(str(folder / "door"))
        assert list(ask(opened, ask="count", count=1)) == [{"number": 0}]
        for line in silent:
            line.close()


def test_nobody_there_is_said_with_what_to_do(server):
    with pytest.raises(ServerAwayError, match="start it with `trilemma federation up"):
        list(ask(server, ask="status"))
