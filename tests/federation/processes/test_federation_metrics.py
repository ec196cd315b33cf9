"""Metrics of each party on loopback: what events count, ε at its owner's endpoint alone."""

from __future__ import annotations

import json
import socket
import urllib.request

import pytest

from federation_harness import PRIVATE, Direct, asks, make, small_config
from free_ports import free_ports
from trilemma.base.errors import UserError
from trilemma.federation.client.node import Node
from trilemma.federation.party.layout import METRICS
from trilemma.federation.processes.logs import EventLog, events_file
from trilemma.federation.protocol import events
from trilemma.federation.protocol.events import Say, to_all
from trilemma.federation.server.coordinator import open_run

CollectorRegistry = pytest.importorskip("prometheus_client").CollectorRegistry
from trilemma.federation.processes import metrics  # noqa: E402
from trilemma.federation.processes.metrics import Metrics  # noqa: E402

CLIENTS, ROUNDS = 3, 3


def sends_nonsense(client: int, asked: bytes, answer: bytes) -> bytes:
    return b"nonsense" if client == 2 and asks(asked) else answer


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A private run whose events were counted as they came, and are in logs; client 2 sends nonsense."""
    folder = tmp_path_factory.mktemp("metrics") / "federation"
    parties = make(folder, CLIENTS, small_config(CLIENTS, *PRIVATE), budget=1e6)
    counted = [Metrics(party) for party in parties]

    def told(place: int, run: str | None = None) -> Say:
        party = parties[place]
        log = EventLog(events_file(party.running), party.name, run)
        return to_all(log, counted[place].of(run or ""))

    direct = Direct(parties, sends_nonsense)
    direct.clients = {party.client: Node(party, say=told(1 + party.client)) for party in parties[1:]}
    open_run(parties[0], "run", direct, told(0, "run"), direct.time.clock).go()
    return parties, counted


def text(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def test_counted_as_they_came_or_read_from_the_log_metrics_are_the_same(federation):
    """A process that starts anew goes on counting where it was."""
    parties, counted = federation
    for party, live in zip(parties, counted, strict=True):
        again, samples = (
            {
                (one.name, tuple(one.labels.items())): one.value
                for family in metrics_of.registry.collect()
                for one in family.samples
                if not one.name.endswith("_created")
            }
            for metrics_of in (Metrics(party), live)
        )
        assert again == samples
        assert len(samples) > 5


def test_the_server_tells_rounds_stages_clients_and_bytes(federation):
    value = federation[1][0].registry.get_sample_value
    assert value("trilemma_rounds_total", {"run": "run"}) == ROUNDS
    assert value("trilemma_round", {"run": "run"}) == ROUNDS
    clients = {
        state: value("trilemma_clients", {"run": "run", "state": state})
        for state in ("present", "absent", "rejected")
    }
    assert clients == {"present": 2, "absent": 0, "rejected": 1}
    assert value("trilemma_stage_seconds_total", {"run": "run", "stage": "aggregate"}) > 0
    assert value("trilemma_message_bytes_total", {"run": "run"}) > 0


def test_what_was_spent_is_told_by_its_owner_alone_and_on_loopback_alone(federation):
    parties, _ = federation
    base = free_ports(1)
    served = metrics.serve(parties[1], str(base - 1))
    assert served is not None
    told = text(base)
    assert 'trilemma_client_epsilon{accountant="exact"}' in told
    assert "trilemma_client_epsilon_budget 1e+06" in told
    assert "loss" not in told
    server = "".join(one.name for one in Metrics(parties[0]).registry.collect())
    assert "epsilon" not in server
    assert metrics.serve(parties[1], str(base - 1)) is None, "a taken port keeps nobody from working"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", base), timeout=60)  # this machine too, at another address


def test_expelled_clients_are_counted():
    registry = CollectorRegistry()
    server = metrics.Counts(metrics.SERVER, registry)
    event = events.CLIENT_EXPELLED(round=3, client=1, test="length", figures={"statistic": 9.0})
    server.count(event.code, "monday", event.facts)
    assert registry.get_sample_value("trilemma_expelled_total", {"run": "monday"}) == 1


def test_metrics_are_off_unless_asked_for(federation, monkeypatch):
    party = federation[0][0]
    assert metrics.serve(party, None) is None
    assert metrics.serve(party, "0") is None
    with pytest.raises(UserError, match=METRICS):
        metrics.serve(party, "65536")


def test_a_log_that_was_edited_is_counted_as_far_as_it_goes(tmp_path):
    (party, *_) = make(tmp_path / "federation", CLIENTS, small_config(CLIENTS))
    path = events_file(party.running)
    path.parent.mkdir(parents=True)
    lines = [{"event": "round-committed", "run": "run"}, {"event": "epoch-called", "epoch": 4, "run": "run"}]
    broken = ["[" * 100_000, '{"event": []}', json.dumps({"event": "epoch-called", "epoch": 10**400})]
    path.write_text("\n".join([*broken, *(json.dumps(line) for line in lines)]))
    assert Metrics(party).registry.get_sample_value("trilemma_epoch", {"run": "run"}) == 4
