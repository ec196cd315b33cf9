"""The fault matrix: every row is a fault in a real federation on loopback.

Five clients, f = 1. One federation serves all rows that leave it whole; each row is a run of its own.
Processes are killed by process group, every wait is bounded, and nothing may be left behind. Rows that wait
for a limit, or bring up a federation of their own, are left to the night: tests/federation has them without
processes.
"""

from __future__ import annotations

import os

import pytest
from deployed_harness import FAST, real, wait_for

from federation_harness import PRIVATE, small_config
from trilemma.base import files
from trilemma.federation.operations import deployment

pytestmark = [pytest.mark.federation, pytest.mark.slow]

CLIENTS = 5


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    config = small_config(CLIENTS, *PRIVATE, rounds=3)
    folder = tmp_path_factory.mktemp("faults") / "federation"
    with real(folder, CLIENTS, config, budget=1e6) as running:
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


def test_nan_oversized_and_replayed_replies(federation):
    """One liar, another lie in every round: no round is lost, and what arrives is rejected for its reason.

    What is too long is refused when it is announced.
    """
    federation.set_timing(round_limit=10.0)
    with federation.liar(1, "changing"):
        records = federation.go("lies")
    assert absences(records) == [[], [], []]
    (nan,), (replayed,), (oversized,) = (record["rejected"] for record in records)
    assert nan == [1, "tensors ['vector'] where only 'encoded' was declared"]
    assert oversized[0] == 1
    assert replayed == [1, "round 0 where 1 was asked"]


@pytest.mark.nightly
def test_crashed_client_comes_back(federation):
    """kill -9 of a client after round 1; the others go on, and it takes part when it is started again.

    It may have answered round 2 before it was killed.
    """
    federation.set_timing(round_limit=20.0)
    log, victim = federation.log("crash"), federation.client(0)
    federation.start("crash")
    wait_for(lambda: len(log.records()) >= 1, 240.0)
    federation.kill(victim)
    wait_for(lambda: [0] in absences(log.records()), 240.0)
    federation.restart(victim)
    assert federation.wait("crash") == "completed"
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


def test_server_killed(federation):
    """kill -9 of the server in a run: it goes on by itself, and the clients come back by themselves."""
    log = federation.log("killed")
    clients = [federation.process(party) for party in federation.parties[1:]]
    federation.start("killed")
    wait_for(lambda: len(log.records()) >= 1, 240.0)
    federation.kill(federation.server)
    before = log.records()
    deployment.up(federation.folder)
    wait_for(lambda: len(log.records()) == 3, 240.0)
    assert federation.wait("killed") == "completed"
    records = log.records()
    assert records[: len(before)] == before
    assert [record["round"] for record in records] == [1, 2, 3]
    assert [federation.process(party) for party in federation.parties[1:]] == clients


@pytest.mark.nightly
def test_two_dropouts_of_five(federation):
    """With f = 1 two missing are too many: the round is repeated, then continued by three in a new epoch."""
    federation.set_timing(round_limit=15.0, join_limit=32.0)
    log = federation.log("two")
    federation.start("two")
    wait_for(lambda: len(log.records()) >= 1, 240.0)
    for number in (1, 4):
        federation.kill(federation.client(number))
    assert federation.wait("two") == "completed", federation.said(30)
    records = log.records()
    assert [record["round"] for record in records] == [1, 2, 3]
    assert records[0]["epoch"] == 0
    assert records[-1]["epoch"] == 1
    assert set(records[-1]["weights"]) == {"0", "2", "3"}
