"""A party on its own feet: what ends is started again, what is taken down stays so, who was away is asked."""

from __future__ import annotations

import itertools
import shutil
import time

import pytest

from federation_harness import make, small_config
from trilemma.errors import UserError
from trilemma.federation import processes
from trilemma.federation.processes import Command, ProcessFailed
from trilemma.flower import attending, deployment, internals, server_app
from trilemma.flower.control import Control
from trilemma.flower.server_app import GridTransport


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A client whose processes sleep."""
    _, client = make(tmp_path / "federation", 1, small_config(1, tolerate=0))
    sleepers = [Command(name, ("sleep", "60")) for name in ("supernode", "worker")]
    monkeypatch.setattr(deployment, "commands", lambda party: sleepers)
    yield client
    deployment.down(client.folder, grace=1.0)


def end(client, name):
    one = next(one for one in processes.recorded(client.running) if one.name == name)
    processes.signal_all([one], processes.signal.SIGKILL)
    while processes.leads(one):
        time.sleep(0.01)


def alive(client):
    return [one.process for one in deployment.status(client.folder) if one.alive]


def test_what_ends_is_started_again(client):
    deployment.up(client.folder)
    assert attending.revive([client], [], print) == []
    end(client, "worker")
    ends = attending.revive([client], [], print)
    assert [what for _, what in ends] == ["client-0: worker"]
    assert alive(client) == ["supernode", "worker"]


def test_clients_that_were_killed_together_are_brought_back_together(tmp_path, monkeypatch):
    """Nobody waits until another one has started."""
    folder = tmp_path / "federation"
    server, *clients = make(folder, 3, small_config(3, tolerate=0))
    sleepers = [Command(name, ("sleep", "60")) for name in ("supernode", "worker")]
    monkeypatch.setattr(deployment, "commands", lambda party: sleepers if party in clients else [])
    together: list[list[str]] = []
    real, said = deployment.bring_up, []

    def bring_up(every, say):
        together.append([party.name for party in every])
        return real(every, say)

    try:
        for party in clients:
            deployment.start_party(party)
        for party in clients[:2]:
            end(party, "worker")
        monkeypatch.setattr(deployment, "bring_up", bring_up)
        ends = attending.revive([server, *clients], [], said.append)
        assert together == [[], ["client-0", "client-1"]]
        assert [what for _, what in ends] == ["client-0: worker", "client-1: worker"]
        assert [alive(party) for party in clients] == [["supernode", "worker"]] * 3
    finally:
        deployment.down(folder, grace=1.0)


def test_a_run_is_continued_though_something_else_ended_first(tmp_path, monkeypatch):
    """A new worker waits for the word to go on, whoever was to give it and could not."""
    server = make(tmp_path / "federation", 1, small_config(1, tolerate=0))[0]
    sleepers = [Command(name, ("sleep", "60")) for name in ("superlink", "guard", "worker")]
    monkeypatch.setattr(deployment, "commands", lambda party: sleepers)
    for name in ("check_start", "refresh"):
        monkeypatch.setattr(deployment, name, lambda *_: None)
    continued, waits = [], itertools.count()
    monkeypatch.setattr(deployment, "_continue", lambda party, say: continued.append(party.name))

    def wait(party, running):
        if next(waits) == 1:
            raise ProcessFailed("guard ended at once")

    monkeypatch.setattr(deployment, "_wait_for_ports", wait)
    try:
        deployment.up(server.folder)
        assert continued == ["server"]
        end(server, "superlink")
        ends = attending.revive([server], [], print)
        assert continued == ["server"], "the guard ended before it came to that"
        end(server, "guard")
        attending.revive([server], ends, print)
        assert continued == ["server", "server"]
        attending.revive([server], ends, print)
        assert continued == ["server", "server"]
    finally:
        deployment.down(server.folder, grace=1.0)


def test_what_keeps_ending_is_given_up_with_its_last_words(client):
    deployment.up(client.folder)
    ends = [(time.monotonic(), "client-0: worker")] * (attending.ENOUGH - 1)
    assert len(attending.revive([client], ends, print)) == len(ends)
    end(client, "worker")
    with pytest.raises(ProcessFailed, match="worker keeps ending"):
        attending.revive([client], ends, print)


def test_what_was_taken_down_stays_down_and_whoever_attends_it_leaves(client, monkeypatch):
    deployment.up(client.folder)
    monkeypatch.setattr(attending.signal, "signal", lambda *_: None)
    naps = itertools.count()

    def nap(seconds):
        if next(naps) == 1:
            deployment.down(client.folder, grace=1.0)

    monkeypatch.setattr(attending.time, "sleep", nap)
    attending.attend(client.folder)
    assert next(naps) >= 2
    assert alive(client) == []


def test_a_client_that_cannot_start_keeps_no_other_from_starting(tmp_path, monkeypatch):
    folder = tmp_path / "federation"
    everyone = make(folder, 3, small_config(3, tolerate=0))[1:]
    shutil.rmtree(folder / "server")
    sleepers = [Command(name, ("sleep", "60")) for name in ("supernode", "worker")]
    monkeypatch.setattr(deployment, "commands", lambda party: sleepers)

    def check(party, say):
        if party.client == 1:
            raise UserError("client-1 cannot start: its port is taken")

    monkeypatch.setattr(deployment, "check_start", check)
    try:
        with pytest.raises(UserError, match="client-1 cannot start"):
            deployment.up(folder)
        assert [alive(party) for party in everyone] == [["supernode", "worker"], [], ["supernode", "worker"]]
    finally:
        deployment.down(folder, grace=1.0)


# --- the operator's word ------------------------------------------------------------------------------


class Desk(Control):
    """A SuperLink's control interface on paper."""

    def __init__(self, *active: str) -> None:
        self.runs = dict(enumerate(active))
        self.stopped: list[str] = []

    def active(self):
        return dict(self.runs)

    def start(self, app, name):
        self.runs[len(self.runs) + 100] = name
        return len(self.runs) + 99

    def stop(self, run):
        self.stopped.append(self.runs.pop(run))


def test_a_run_never_stops_another_unasked(tmp_path):
    desk = Desk("a")
    with pytest.raises(UserError, match="run 'a' is under way and is not stopped unasked"):
        desk.begin(tmp_path, "b")
    assert desk.stopped == []
    desk.begin(tmp_path, "b", replace=True)
    assert (desk.stopped, list(desk.runs.values())) == (["a"], ["b"])


def test_a_run_that_is_under_way_is_not_started_twice(tmp_path):
    desk = Desk("a")
    assert desk.begin(tmp_path, "a") == 0
    assert list(desk.runs.values()) == ["a"]
    assert desk.begin_again(tmp_path, "a") != 0, "its server app is gone"
    assert desk.stopped == ["a"]


# --- who was away -------------------------------------------------------------------------------------


class Letter:
    """A Flower message outside a task."""

    def __init__(self, content, **facts):
        self.content = content

    def has_error(self):
        return False


class Paper:
    """A grid on paper: what was pushed, and to whom."""

    def __init__(self) -> None:
        self.pushed = []

    def push_messages(self, messages):
        messages = list(messages)
        self.pushed += messages
        return [f"message {len(self.pushed) - len(messages) + place}" for place in range(len(messages))]


def test_a_node_that_was_started_anew_is_asked_again_under_the_same_name(tmp_path, monkeypatch):
    """Its first message is lost with the process that took it; the copy's answer answers the question."""
    server, _ = make(tmp_path / "federation", 1, small_config(1, tolerate=0))
    grid, started, announced = Paper(), {7: "monday"}, {}
    monkeypatch.setattr(internals, "activations", lambda grid: dict(started))
    monkeypatch.setattr(
        internals, "announced", lambda grid, names: {n: announced[n] for n in names if n in announced}
    )
    monkeypatch.setattr(internals, "content", lambda grid, tree: tree)
    monkeypatch.setattr(server_app, "LOOK", 0.0)
    monkeypatch.setattr(server_app, "Message", Letter)
    transport = GridTransport(grid, server)
    sent = transport.send({7: b"block"}, lifetime=60.0)
    assert transport.fetch(list(sent)) == []
    assert len(grid.pushed) == 1
    started[7] = "tuesday"
    assert transport.fetch(list(sent)) == []
    assert transport.fetch(list(sent)) == []
    assert len(grid.pushed) == 2, "once for each time it was started"
    announced["message 1"] = grid.pushed[1]
    (reply,) = transport.fetch(list(sent))
    assert (reply.node, reply.block, reply.question) == (7, b"block", "message 0")


@pytest.mark.parametrize("listened", [False, True])
def test_a_database_whose_superlink_never_listened_is_made_anew(tmp_path, monkeypatch, listened):
    """Killed while it made its tables, no SuperLink would start with it again."""
    server, _ = make(tmp_path / "federation", 1, small_config(1, tolerate=0))
    sleepers = [Command(name, ("sleep", "60")) for name in ("superlink", "guard", "worker")]
    monkeypatch.setattr(deployment, "commands", lambda party: sleepers)
    server.state.mkdir()
    deployment._database(server).write_bytes(b"half a database")
    if listened:
        deployment._listened(server).touch()
    try:
        deployment.start_party(server)
        assert deployment._database(server).is_file() == listened
    finally:
        deployment.down(server.folder, grace=1.0)
