"""The commands, on a real federation of three: init, up, run, continue, refuse, status, down."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from deployed_harness import FAST, sleeper, wait_for

from federation_harness import command, make, small_config
from free_ports import free_ports
from trilemma import config as configurations
from trilemma.base.errors import UserError
from trilemma.federation.operations import deployment
from trilemma.federation.party.layout import METRICS, parties
from trilemma.federation.processes import groups as processes
from trilemma.federation.processes.door import ask
from trilemma.federation.server.commits import CommitLog
from trilemma.federation.server.under_way import run_under_way

pytestmark = [pytest.mark.federation, pytest.mark.slow]


def asked(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def alive(folder) -> list[processes.Running]:
    return [one for party in parties(folder) for one in processes.recorded(party.running)]


def test_a_pilot_from_its_making_to_its_end(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv(METRICS, "")  # `up --metrics` sets it
    folder, config = tmp_path / "pilot", tmp_path / "config.toml"
    options = ["algorithm.name=cafcor", "aggregation.rule=caf", "federation.tolerate=1", "run.rounds=3"]
    private = ["privacy.threat=secldp", "privacy.clip=1.0", "privacy.epsilon=30.0"]
    config.write_text(configurations.parse({}, ["federation.clients=3", *options, *private]).toml())
    metrics = free_ports(4)
    command("init", folder, "--clients", "3", "--config", config)
    try:
        assert "4 processes started" in command("up", folder, "--metrics", metrics)
        assert "everything was running" in command("up", folder)
        first = command("run", folder)
        assert [line.split(",")[0] for line in first.splitlines()[:3]] == ["round 1", "round 2", "round 3"]
        assert "round" not in command("run", folder), "a finished run is not run again"
        assert "run default: finished, 3 rounds committed of 3" in command("status", folder)
        told = json.loads(command("status", folder, "--json"))["parties"]
        assert [one["joined"] for one in told[0]["runs"][0]["members"]] == [True] * 3
        there = told[0]["door"]["there"]
        assert sorted(there) == ["0", "1", "2"]
        assert there["0"]["facts"] == there["2"]["facts"]
        assert 'trilemma_rounds_total{run="default"} 3.0' in asked(metrics)
        assert "trilemma_client_epsilon{" in asked(metrics + 3)
        assert command("doctor", folder).count("all is well") == 4
        with pytest.raises(UserError, match="run 'again' failed"):
            command("run", folder, "--name", "again")
        assert "4 processes stopped" in command("down", folder)
    finally:
        deployment.down(folder)
    with pytest.raises(UserError, match="start it with `trilemma federation up"):
        command("run", folder)


def test_two_at_once_start_everything_once_and_leave_nothing(tmp_path):
    """Each party's process was started twice, and one of the two was forgotten."""
    folder = tmp_path / "pilot"
    made = make(folder, 2, small_config(2, tolerate=0), port=free_ports(1))
    up = (sys.executable, "-m", "trilemma", "federation", "up", str(folder))
    try:
        with ThreadPoolExecutor() as both:
            done = list(both.map(lambda _: subprocess.run(up, capture_output=True, text=True), range(2)))
        assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
        assert sum(one.stdout.count(": started, pid") for one in done) == len(made)
        assert all(map(processes.leads, alive(folder)))
        assert "3 processes stopped" in command("down", folder)
    finally:
        deployment.down(folder)
    assert alive(folder) == []


def test_a_second_process_in_a_folder_says_so_and_leaves_the_first_alone(tmp_path):
    folder = tmp_path / "pilot"
    make(folder, 1, small_config(1, tolerate=0), port=free_ports(1))
    try:
        deployment.up(folder)
        before = alive(folder)
        own = deployment.command(parties(folder)[0]).argv
        second = subprocess.run(own, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert "another process works in" in second.stderr
        assert alive(folder) == before
        assert all(map(processes.leads, before))
    finally:
        deployment.down(folder)


def test_a_process_whose_starter_was_killed_is_known_and_stopped(tmp_path):
    """It writes down itself that it is there: nobody else has to live until then."""
    folder = tmp_path / "pilot"
    (server, _) = make(folder, 1, small_config(1, tolerate=0), port=free_ports(1))
    own = deployment.command(server)
    with subprocess.Popen(own.argv, stdout=subprocess.DEVNULL) as orphan:
        try:
            wait_for(server.ready.exists, 60.0)
            assert [one.pid for one in processes.recorded(server.running)] == [orphan.pid]
            assert deployment.down(folder) == 1
        finally:
            orphan.terminate()
        assert orphan.wait(60) == 0


def test_a_taken_port_is_a_sentence(tmp_path):
    folder, port = tmp_path / "pilot", free_ports(1)
    make(folder, 1, small_config(1, tolerate=0), port=port)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(UserError, match=f"port {port} of 127.0.0.1, the server's, is taken by"),
    ):
        command("up", folder)
    assert alive(folder) == []


def test_a_run_goes_on_when_nobody_watches_and_after_a_rest(tmp_path):
    folder = tmp_path / "pilot"
    make(folder, 1, small_config(1, tolerate=0, rounds=100_000), port=free_ports(1), timing=FAST)
    try:
        deployment.up(folder)
        with pytest.raises(UserError, match="after 5 s run 'default' goes on; see how far it is with"):
            command("run", folder, "--limit", "5")
        with pytest.raises(UserError, match="run 'default' is under way and is not stopped unasked"):
            command("run", folder, "--name", "other", "--limit", "5")
        with pytest.raises(UserError, match="run 'other' goes on"):
            command("run", folder, "--name", "other", "--limit", "5", "--replace")
        assert command("down", folder).strip() == "2 processes stopped"
        server = parties(folder)[0]
        assert run_under_way(server) == "other", "it was broken off, and nobody stopped it"
        log = CommitLog(server.run_folder("other"))
        before = len(log.records())
        deployment.up(folder)
        watching = (sys.executable, "-m", "trilemma", "federation", "run", str(folder), "--name", "other")
        with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True) as watched:
            assert watched.stdout is not None
            assert watched.stdout.readline().startswith("round ")
            deployment.restart(server)
            said = iter(watched.stdout.readline, "")
            assert any("the server is back" in line for line in said)
            watched.kill()
        wait_for(lambda: len(log.records()) > before, 60.0)
        list(ask(server, ask="stop"))
        assert run_under_way(server) is None
    finally:
        deployment.down(folder)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_a_pilot_may_have_an_address_of_ipv6(tmp_path):
    folder, config, port = tmp_path / "pilot", tmp_path / "config.toml", free_ports(1)
    options = ["federation.clients=2", "federation.tolerate=0", "run.rounds=2"]
    config.write_text(configurations.parse({}, options).toml())
    made = command("init", folder, "--config", config, "--host", "::1", "--port", port)
    assert f"Clients connect to [::1]:{port}" in made
    try:
        command("up", folder)
        assert "finished" in command("run", folder)
        assert command("doctor", folder).count("all is well") == 3
        assert f"[::1]:{port}" in (folder / "server" / "run" / "process.log").read_text()
    finally:
        command("down", folder)
    assert alive(folder) == []


def test_a_client_without_its_public_facts_starts_nothing_hides_nothing_and_is_taken_down(
    tmp_path, monkeypatch
):
    folder, asked = tmp_path / "pilot", []
    command("init", folder, "--clients", "2")
    lost = parties(folder)[1]
    (lost.folder / "federation.toml").unlink()
    monkeypatch.setattr(deployment, "bring_up", lambda every, say: asked.extend(every))
    with pytest.raises(UserError, match=r"client-0 cannot start: there is no federation\.toml in"):
        command("up", folder)
    assert [party.name for party in asked] == ["server", "client-1"], "it keeps nobody from starting"
    sleeping = sleeper(lost)
    try:
        assert json.loads(command("status", folder, "--json"))["parties"][2]["processes"][0]["alive"]
        assert "1 process stopped" in command("down", folder)
        assert not processes.leads(sleeping), "it went on when its folder was passed over"
        assert deployment.taken_down(lost).exists()
    finally:
        processes.stop([sleeping], lost.running)
