"""The commands, on a real federation of three: init, up, run, continue, refuse, status, down."""

from __future__ import annotations

import json
import socket
import time
import urllib.request

import pytest
from typer.testing import CliRunner

from free_ports import free_ports
from trilemma import config as configurations
from trilemma.cli.federation import federation_app
from trilemma.errors import UserError
from trilemma.federation import processes
from trilemma.federation.layout import METRICS, parties
from trilemma.flower import deployment

pytestmark = [pytest.mark.federation, pytest.mark.slow]


def command(*arguments: str) -> str:
    outcome = CliRunner().invoke(federation_app, arguments)
    if isinstance(outcome.exception, UserError):
        raise outcome.exception
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def asked(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def test_a_pilot_from_its_making_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv(METRICS, "")  # `up --metrics` sets it
    folder, config = str(tmp_path / "pilot"), tmp_path / "config.toml"
    options = ["algorithm.name=cafcor", "aggregation.rule=caf", "federation.tolerate=1", "run.rounds=3"]
    private = ["privacy.threat=secldp", "privacy.clip=1.0", "privacy.epsilon=30.0"]
    config.write_text(configurations.parse({}, ["federation.clients=3", *options, *private]).toml())
    port = free_ports(8)
    metrics = port + 5  # after the guard's, the clients' and the SuperLink's
    command("init", folder, "--clients", "3", "--config", str(config), "--port", str(port))
    try:
        assert "9 processes started" in command("up", folder, "--metrics", str(metrics))
        assert "everything was running" in command("up", folder)
        first = command("run", folder)
        assert [line.split(",")[0] for line in first.splitlines()[:3]] == ["round 1", "round 2", "round 3"]
        assert "round" not in command("run", folder), "a finished run is not run again"
        assert "run default: finished, 3 rounds committed of 3" in command("status", folder)
        told = json.loads(command("status", folder, "--json"))["parties"]
        assert [one["joined"] for one in told[0]["runs"][0]["members"]] == [True] * 3
        seen = told[0]["door"]["peers"]["2"]
        assert abs(seen["clock"]) < 60
        assert time.time() - seen["pulled"] < 240
        assert seen["facts"]["roster"] == told[0]["door"]["peers"]["0"]["facts"]["roster"]
        assert 'trilemma_rounds_total{run="default"} 3.0' in asked(metrics)
        assert "trilemma_client_epsilon{" in asked(metrics + 3)
        assert command("doctor", folder).count("all is well") == 4
        with pytest.raises(UserError, match="budget: the client's own budget does not allow it"):
            command("run", folder, "--name", "again")
        assert "9 processes stopped" in command("down", folder)
    finally:
        deployment.down(tmp_path / "pilot")
    with pytest.raises(UserError, match="start it with `up`"):
        command("run", folder)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_a_pilot_may_have_an_address_of_ipv6(tmp_path):
    folder, config, port = str(tmp_path / "pilot"), tmp_path / "config.toml", free_ports(2)
    options = ["federation.clients=2", "federation.tolerate=0", "run.rounds=2"]
    config.write_text(configurations.parse({}, options).toml())
    made = command("init", folder, "--config", str(config), "--host", "::1", "--port", str(port))
    assert f"Clients connect to [::1]:{port}" in made
    try:
        command("up", folder)
        assert "finished" in command("run", folder)
        assert command("doctor", folder).count("all is well") == 3
        started = (tmp_path / "pilot" / "server" / "run" / "guard.log").read_text()
        assert f"[::1]:{port}" in started
    finally:
        command("down", folder)
    assert deployment.status(tmp_path / "pilot") == []


def test_a_client_without_its_public_facts_starts_nothing_hides_nothing_and_is_taken_down(
    tmp_path, monkeypatch
):
    folder, asked = tmp_path / "pilot", []
    command("init", str(folder), "--clients", "2")
    lost = parties(folder)[1]
    (lost.folder / "federation.toml").unlink()
    monkeypatch.setattr(deployment, "bring_up", lambda every, say: asked.extend(every))
    with pytest.raises(UserError, match=r"client-0 cannot start: there is no federation\.toml in"):
        command("up", str(folder))
    assert [party.name for party in asked] == ["server", "client-1"], "it keeps nobody from starting"
    sleeping = processes.start(processes.Command("worker", ("sleep", "600")), lost.running)
    try:
        assert json.loads(command("status", str(folder), "--json"))["parties"][2]["processes"][0]["alive"]
        assert "1 processes stopped" in command("down", str(folder))
        assert not processes.leads(sleeping), "it went on when its folder was passed over"
        assert deployment.taken_down(lost).exists()
    finally:
        processes.stop([sleeping], lost.running)
