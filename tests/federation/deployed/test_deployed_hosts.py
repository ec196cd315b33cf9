"""Five machines, as far as one can be five: network namespaces, each with a cable to one switch.

What is on loopback on one host cannot be reached from another, so this finds whatever works on one machine
only. Every client's line to the server is slow, and breaks again and again (`deployed_bad_line.py`); one
cable is pulled out for a while. It takes the right to make namespaces, and is skipped without.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from deployed_harness import Real, wait_for

from federation_harness import PRIVATE, make, result_of, small_config
from trilemma.base.records import Record
from trilemma.federation.operations import deployment
from trilemma.federation.party.layout import Party
from trilemma.federation.party.permission import Permission
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.processes import groups as processes
from trilemma.federation.server.replay import replay

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

CLIENTS, ROUNDS, PORT = 4, 600, 9190
NOISE = ("privacy.sigma_ind=20.0", "privacy.sigma_cor=20.0")  # for so many rounds at a finite price
TIMING = Timing(round_limit=40.0, join_limit=120.0, poll=0.2)
BAD_LINE = Path(__file__).with_name("deployed_bad_line.py")
DELAY, PIECES = "0.02", "100"
MISSED = 2
"""Rounds without a client that has answered something since it is back: one that was nearly over, and one
that began while the answer was on its way."""


def system(*words: str) -> None:
    """Run a command of the system's; what it complains about is raised."""
    told = subprocess.run(words, capture_output=True, text=True, timeout=240)
    if told.returncode:
        raise OSError(f"{' '.join(words)}: {told.stderr.strip()}")


class Hosts:
    """Five hosts and a switch; host 0 is the server's, host 1 + i client i's."""

    def __init__(self) -> None:
        self.switch = f"tri{os.getpid()}"
        self.names = [f"{self.switch}-{number}" for number in range(1 + CLIENTS)]

    @contextlib.contextmanager
    def plugged_in(self) -> Iterator[Hosts]:
        with contextlib.ExitStack() as stack:
            for name in (self.switch, *self.names):
                system("ip", "netns", "add", name)
                stack.callback(system, "ip", "netns", "del", name)
                system("ip", "-netns", name, "link", "set", "lo", "up")
            system("ip", "-netns", self.switch, "link", "add", "switch", "type", "bridge")
            system("ip", "-netns", self.switch, "link", "set", "switch", "up")
            for number, name in enumerate(self.names):
                veth = ("type", "veth", "peer", "name", "eth0", "netns", name)
                system("ip", "-netns", self.switch, "link", "add", f"port{number}", *veth)
                system("ip", "-netns", self.switch, "link", "set", f"port{number}", "master", "switch", "up")
                address = f"{self.address(number)}/24"
                system("ip", "-netns", name, "address", "add", address, "dev", "eth0")
                system("ip", "-netns", name, "link", "set", "eth0", "up")
            yield self

    def address(self, number: int) -> str:
        return f"10.77.13.{number + 1}"

    def plug(self, number: int, state: str) -> None:
        """Put a host's cable in (`up`), or pull it out (`down`)."""
        system("ip", "-netns", self.switch, "link", "set", f"port{number}", state)

    @contextlib.contextmanager
    def bad_lines(self) -> Iterator[None]:
        """Put a bad line between every client and the server, which is somewhere else in truth."""
        far = "10.77.13.101"
        system("ip", "-netns", self.names[0], "address", "add", f"{far}/24", "dev", "eth0")
        with contextlib.ExitStack() as stack:
            for name in self.names[1:]:
                system("ip", "-netns", name, "address", "add", f"{self.address(0)}/32", "dev", "lo")
                line = (sys.executable, str(BAD_LINE), self.address(0), far, str(PORT), DELAY, PIECES)
                process = subprocess.Popen(("ip", "netns", "exec", name, *line))
                stack.callback(process.wait, 10)
                stack.callback(process.kill)
            yield

    def on(self, number: int, *arguments: str) -> tuple[str, ...]:
        """A command of ours, as it is typed on a host."""
        ours = (sys.executable, "-m", "trilemma", "federation")
        return ("ip", "netns", "exec", self.names[number], *ours, *arguments)


@pytest.fixture
def hosts():
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here")
    with contextlib.ExitStack() as stack:
        try:
            plugged = stack.enter_context(Hosts().plugged_in())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        stack.enter_context(plugged.bad_lines())
        yield plugged


@pytest.fixture
def federation(tmp_path, hosts):
    """A federation whose parties are on hosts of their own, each brought up there."""
    address = {"host": hosts.address(0), "listen": "0.0.0.0", "port": PORT}
    config = small_config(CLIENTS, *PRIVATE, *NOISE, rounds=ROUNDS)
    folder = tmp_path / "federation"
    parties = make(folder, CLIENTS, config, budget=1e9, timing=TIMING, transcript=True, **address)
    for party in parties[1:]:
        Permission().with_plan(party.agreed.plan).save(party.allowed)
    try:
        with ThreadPoolExecutor() as everywhere:
            ups = [
                everywhere.submit(system, *hosts.on(number, "up", str(party.folder)))
                for number, party in enumerate(parties)
            ]
        for up in ups:
            up.result()
        yield Real(folder, parties)
    finally:
        deployment.down(folder, grace=2.0)
    assert not any(processes.recorded(party.running) for party in parties)


def test_five_hosts_of_which_one_is_cut_off_and_another_taken_down_for_a_while(federation, hosts):
    """The others go on; who is back is heard within a round; the model is what was heard."""
    log = federation.log("cut")

    def away(client: int) -> bool:
        return client in Record.read(log.records()[-1]).unheard

    run = hosts.on(0, "run", str(federation.server.folder), "--name", "cut", "--limit", "800")
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            wait_for(lambda: len(log.records()) >= 1, 240.0)
            hosts.plug(1 + 3, "down")
            wait_for(lambda: away(3), 120.0)
            hosts.plug(1 + 3, "up")
            comes_back(federation, 3)
            one = federation.client(2).folder
            system(*hosts.on(1 + 2, "down", str(one)))
            wait_for(lambda: away(2), 120.0)
            system(*hosts.on(1 + 2, "up", str(one)))
            comes_back(federation, 2)
            assert len(log.records()) < ROUNDS, "there were too few rounds to come back in"
            said, _ = running.communicate(timeout=800)
        finally:
            running.kill()
    assert running.returncode == 0, f"{said}\n{federation.said(40)}"
    assert [record["round"] for record in log.records()] == list(range(1, ROUNDS + 1))
    assert not Record.read(log.records()[-1]).unheard
    replayed = replay(federation.server, "cut").broadcast["params"]
    assert torch.equal(result_of(federation.parties, "cut")["params"], replayed)


def comes_back(federation: Real, client: int) -> None:
    """Wait until a client that is back is heard; it is asked at once, and heard once it answered something.

    How long its program takes to start is the machine's business. Whatever else happens is counted in rounds.
    """
    back, log = time.time(), federation.log("cut")
    wait_for(lambda: came(federation, client) > back, 120.0)
    under_way = len(log.records())
    wait_for(lambda: answers_since(federation, client, back), 240.0)
    when, asked = answers_since(federation, client, back)[0]
    assert asked <= under_way + 2, "it was not asked in the round under way, nor in the next"

    def rounds_without() -> list[dict]:
        committed = events(federation.server, "round-committed")
        return [one for one in committed if time_of(one) > when and client not in one["heard"]]

    wait_for(
        lambda: client not in Record.read(log.records()[-1]).unheard or len(rounds_without()) > MISSED, 240.0
    )
    print(f"client {client} was asked in round {asked}; {len(rounds_without())} rounds without it since")
    assert len(rounds_without()) <= MISSED


def came(federation: Real, client: int) -> float:
    """When the server's process last heard a client that is connected."""
    there = federation.status()["there"].get(str(client))
    return 0.0 if there is None else there["heard"]


def answers_since(federation: Real, client: int, moment: float) -> list[tuple[float, int]]:
    """When a client answered since then, and in which rounds."""
    given = events(federation.client(client), "round-answered", "answer-repeated")
    return [(time_of(one), one["round"]) for one in given if time_of(one) > moment]


def events(party: Party, *names: str) -> list[dict]:
    """What a party's process has written down of these events; a line that is being written is none yet."""
    lines = (party.running / "events.jsonl").read_bytes().split(b"\n")[:-1]
    return [one for one in map(json.loads, lines) if one["event"] in names]


def time_of(event: dict) -> float:
    return dt.datetime.fromisoformat(event["time"]).timestamp()
