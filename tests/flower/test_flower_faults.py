"""The fault matrix: every row is a fault in a real federation on loopback, with TLS and node authentication.

Five clients, f = 1. One federation serves all rows that leave it whole; each row is a run of its own.
Processes are killed by process group, every wait is bounded, and nothing may be left behind. Rows that wait
for a limit, or bring up a federation of their own, are left to the night: tests/federation has them without
processes.
"""

from __future__ import annotations

import datetime as dt
import os
import re

import pytest
from flower_harness import FAST, real, wait_for

from federation_harness import PRIVATE, make, small_config
from free_ports import free_ports
from trilemma import files
from trilemma.errors import UserError
from trilemma.federation import certificates, node_keys, processes, provisioning
from trilemma.federation.processes import Command
from trilemma.flower import deployment
from trilemma.flower.control import connect
from trilemma.flower.deployment import commands
from trilemma.flower.supernode_internals import ACTIVATION

pytestmark = [pytest.mark.federation, pytest.mark.slow]

CLIENTS = 5


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    config = small_config(CLIENTS, *PRIVATE, rounds=3)
    folder = tmp_path_factory.mktemp("faults") / "federation"
    with real(folder, CLIENTS, config, budget=1e6, durable=False) as running:
        running.go("warm-up")
        yield running


@pytest.fixture(autouse=True)
def whole_again(request):
    """Give the next row a federation with everybody in it."""
    yield
    if "federation" in request.fixturenames:
        running = request.getfixturevalue("federation")
        deployment.up(running.folder)
        running.set_timing(round_limit=FAST.round_limit, join_limit=FAST.join_limit)


def absences(records):
    return [record["absent"] for record in records]


def test_nobody_fails(federation):
    records = federation.go("plain")
    assert [record["round"] for record in records] == [1, 2, 3]
    assert absences(records) == [[], [], []]
    assert not any(record["rejected"] for record in records)


@pytest.mark.nightly
def test_silent_client(federation):
    """It joins and is then never heard again: the first round waits for the limit, all go on without it."""
    federation.set_timing(round_limit=20.0)
    with federation.liar(3, "silent"):
        records = federation.go("silent")
    assert absences(records) == [[3], [3], [3]]
    assert all(record["weights"]["3"] == 0 for record in records)
    waited = [record["seconds"]["exchange"] for record in records]
    assert waited[0] >= 10.0
    assert max(waited[1:]) < waited[0]  # who was not heard last time is not waited for as long


@pytest.mark.nightly
def test_a_reply_that_is_announced_and_never_comes(federation):
    """The server waits for its content, and hears the others meanwhile."""
    federation.set_timing(round_limit=10.0)
    with federation.liar(2, "announces"):
        records = federation.go("announced")
    assert absences(records) == [[2], [2], [2]]
    assert all(record["epoch"] == 0 for record in records)


def test_nan_oversized_and_replayed_replies(federation):
    """One liar, another lie in every round: no round is lost, and what arrives is rejected for its reason.

    What is too long does not arrive: the guard refuses to take it.
    """
    federation.set_timing(round_limit=10.0)
    with federation.liar(1, "changing"):
        records = federation.go("lies")
    assert absences(records) == [[1], [1], [1]]
    (nan,), (replayed,), oversized = (record["rejected"] for record in records)
    assert nan == [1, "tensors ['vector'] where only 'encoded' was declared"]
    assert oversized == []
    assert "bytes where at most" in (federation.server.running / "guard.log").read_text()
    assert replayed == [1, "round 0 where 1 was asked"]


@pytest.mark.nightly
def test_a_second_reply_to_the_same_message(federation):
    """Flower's SuperLink takes one reply to a message and refuses the next: no round is lost by it.

    The liar's own SuperNode mixes up its replies and is late for some rounds; nobody else notices.
    """
    federation.set_timing(round_limit=20.0)
    superlink = federation.server.running / "superlink.log"
    refusals = "Failed to store Message reply|does not exist"
    before = len(re.findall(refusals, superlink.read_text()))
    with federation.liar(1, "twice"):
        records = federation.go("twice")
    assert [record["round"] for record in records] == [1, 2, 3]
    assert all(record["absent"] in ([], [1]) for record in records)
    assert len(re.findall(refusals, superlink.read_text())) > before


@pytest.mark.nightly
def test_crashed_client_comes_back(federation):
    """kill -9 of a client after round 1; the others go on, and it takes part when it is started again.

    It may have answered round 2 before it was killed.
    """
    federation.set_timing(round_limit=20.0)
    log, victim = federation.log("crash"), federation.client(0)
    run = federation.start("crash")
    wait_for(lambda: len(log.records()) >= 1, 240.0)
    federation.kill(victim, "worker")
    federation.kill(victim, "supernode")
    wait_for(lambda: [0] in absences(log.records()), 240.0)
    federation.restart(victim)
    assert federation.wait(run) == "finished:completed"
    seen = absences(log.records())
    assert seen[0] == []
    assert [0] in seen
    assert absences(federation.go("back")) == [[], [], []]


def test_wrong_key(federation):
    """A client whose identity is not the one on the roster does not get in; the others go on without it."""
    victim = federation.client(2)
    right = victim.identity.read_bytes()
    files.write_atomically(victim.identity, os.urandom(32).hex().encode(), secret=True)
    try:
        records = federation.go("wrong-key")
    finally:
        files.write_atomically(victim.identity, right, secret=True)
    assert absences(records) == [[2], [2], [2]]
    assert "rejected client 2: keys: the epoch's keys were not accepted" in federation.said(30)
    assert "is not on the roster" in victim.log.read_text()


def test_unregistered_node(federation, tmp_path):
    """A node with a key the server does not know cannot connect, and the run does not notice."""
    stranger = federation.client(4)
    private, _ = node_keys.new_node_key()
    files.write_atomically(tmp_path / "node.key", private, secret=True)
    supernode = commands(stranger)[0]
    argv = list(supernode.argv)
    argv[argv.index(str(stranger.node_key))] = str(tmp_path / "node.key")
    argv[argv.index("--port") + 1] = str(stranger.federation.runtime_port(CLIENTS + 1))
    outsider = processes.start(
        Command("outsider", tuple(argv), {**supernode.environment, ACTIVATION: "3"}), tmp_path
    )
    try:
        wait_for(lambda: not processes.leads(outsider), 240.0)
        assert "Exit Code" in processes.tail(outsider.log, 40)
        assert absences(federation.go("outsider")) == [[], [], []]
    finally:
        processes.stop([outsider], tmp_path)


def test_server_app_killed(federation):
    """kill -9 of the server app between commits: the run continues from the last committed round."""
    log = federation.log("killed")
    federation.start("killed")
    wait_for(lambda: len(log.records()) >= 1, 240.0)
    federation.kill(federation.server, "worker")
    before = log.records()
    deployment.up(federation.folder)
    records = federation.go("killed")
    assert records[: len(before)] == before
    assert [record["round"] for record in records] == [1, 2, 3]


@pytest.mark.nightly
def test_superlink_killed(tmp_path):
    """kill -9 of the SuperLink and of the server app; the clients reconnect by themselves."""
    config = small_config(3, *PRIVATE, rounds=3)
    with real(tmp_path / "federation", 3, config, budget=1e6) as federation:
        log = federation.log("link")
        federation.start("link")
        wait_for(lambda: len(log.records()) >= 1, 240.0)
        clients = [federation.process(party, "supernode").pid for party in federation.parties[1:]]
        federation.kill(federation.server, "superlink")
        federation.kill(federation.server, "worker")
        before = log.records()
        deployment.up(federation.folder)
        records = federation.go("link")
        assert records[: len(before)] == before
        assert [record["round"] for record in records] == [1, 2, 3]
        assert clients == [federation.process(party, "supernode").pid for party in federation.parties[1:]]


@pytest.mark.nightly
def test_two_dropouts_of_five(federation):
    """With f = 1 two missing are too many: the round is repeated, then continued by three in a new epoch."""
    federation.set_timing(round_limit=15.0, join_limit=32.0)
    log = federation.log("two")
    run = federation.start("two")
    wait_for(lambda: len(log.records()) >= 1, 240.0)
    for number in (1, 4):
        federation.kill(federation.client(number), "worker")
        federation.kill(federation.client(number), "supernode")
    assert federation.wait(run) == "finished:completed", federation.said(30)
    records = log.records()
    assert [record["round"] for record in records] == [1, 2, 3]
    assert records[0]["epoch"] == 0
    assert records[-1]["epoch"] == 1
    assert set(records[-1]["weights"]) == {"0", "2", "3"}


@pytest.mark.nightly
def test_expired_certificate(tmp_path):
    """Nobody talks to a server whose certificate has expired."""
    folder = tmp_path / "federation"
    server, client = make(folder, 1, small_config(1, tolerate=0), timing=FAST, port=free_ports(1))
    authority = certificates.Issued(
        (folder / "authority" / "ca.crt").read_bytes(), (folder / "authority" / "ca.key").read_bytes()
    )
    yesterday = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    provisioning.install_certificate(server, certificates.issue_server(authority, ("127.0.0.1",), yesterday))
    try:
        with pytest.raises(UserError, match=r"server\.crt has expired"):
            deployment.up(folder)
        for party in (server, client):  # as somebody would who does not ask the doctor
            deployment.start_party(party)
        supernode = next(one for one in processes.recorded(client.running) if one.name == "supernode")
        wait_for(lambda: not processes.leads(supernode), 240.0)
        assert "certificate has expired" in processes.tail(supernode.log, 40)
    finally:
        deployment.down(folder)
    provisioning.write_certificate(server, authority, ("127.0.0.1",))
    try:
        deployment.up(folder)
        with connect(server) as control:
            wait_for(lambda: [node.status for node in control.nodes()] == ["online"], 240.0)
    finally:
        deployment.down(folder)
    assert deployment.status(folder) == []
