"""Five machines, as far as one can be five: network namespaces, each with a cable to one switch.

What is on loopback on one host cannot be reached from another, so this finds whatever works on one machine
only. A cable is pulled out for a while; where the kernel has netem (`tc`) all of them are slow and lose
packets too, and where it has not the test says so. It takes the right to make namespaces, and is skipped
without.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from flower_harness import Real, wait_for

from federation_harness import PRIVATE, make, result_of, small_config
from trilemma.federation.layout import Timing
from trilemma.federation.peers import Door, door_file
from trilemma.federation.permission import Permission
from trilemma.federation.replay import replay
from trilemma.flower import deployment

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

CLIENTS, ROUNDS = 4, 60
TIMING = Timing(round_limit=20.0, join_limit=120.0, poll=0.2)
COMES_BACK = 60.0
"""Seconds in which who is back is heard: a round's time, and what a busy machine takes to import torch."""
DELAY, LOSS = "20ms", "1%"


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

    def make_worse(self) -> None:
        """Let every cable be slow and lose packets."""
        for name in self.names:
            netem = ("netem", "delay", DELAY, "loss", LOSS)
            system("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", "root", *netem)

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
        try:
            plugged.make_worse()
            print(f"cables take {DELAY} and lose {LOSS}")
        except OSError as error:
            print(f"no netem here, delay and loss were left out: {error}")
        yield plugged


@pytest.fixture
def federation(tmp_path, hosts):
    """A federation whose parties are on hosts of their own, each brought up there."""
    address = {"host": hosts.address(0), "listen": "0.0.0.0", "port": 9190}
    config = small_config(CLIENTS, *PRIVATE, rounds=ROUNDS)
    folder = tmp_path / "federation"
    parties = make(folder, CLIENTS, config, budget=1e9, timing=TIMING, transcript=True, **address)
    for party in parties[1:]:
        Permission().with_plan(party.plan).save(party.allowed)
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
    assert deployment.status(folder) == []


def test_five_hosts_of_which_one_is_cut_off_and_another_taken_down_for_a_while(federation, hosts):
    """The others go on; who is back is soon heard again; the model is what was heard."""
    log = federation.log("cut")

    def away(client: int) -> bool:
        return client in log.records()[-1]["absent"]

    run = hosts.on(0, "run", str(federation.server.folder), "--name", "cut", "--limit", "800")
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            wait_for(lambda: len(log.records()) >= 1, 240.0)
            hosts.plug(1 + 3, "down")
            wait_for(lambda: away(3), 120.0)
            hosts.plug(1 + 3, "up")
            wait_for(lambda: not away(3), 120.0)
            one = federation.client(2).folder
            system(*hosts.on(1 + 2, "down", str(one)))
            wait_for(lambda: away(2), 120.0)
            system(*hosts.on(1 + 2, "up", str(one)))
            back = time.time()
            wait_for(lambda: (pulled(federation, 2) or 0.0) > back, 120.0)
            seen = time.monotonic()
            wait_for(lambda: not away(2), COMES_BACK)
            print(f"heard again {time.monotonic() - seen:.1f} s after the server saw it")
            assert len(log.records()) < ROUNDS, "there were too few rounds to come back in"
            said, _ = running.communicate(timeout=800)
        finally:
            running.kill()
    assert running.returncode == 0, f"{said}\n{federation.said(40)}"
    assert [record["round"] for record in log.records()] == list(range(1, ROUNDS + 1))
    assert log.records()[-1]["absent"] == []
    replayed = replay(federation.server, "cut").broadcast["params"]
    assert torch.equal(result_of(federation.parties, "cut")["params"], replayed)


def pulled(federation: Real, client: int) -> float | None:
    """When the server's guard last saw a client ask for work."""
    door = Door.load(door_file(federation.server.running))
    return None if door is None else door.peers[client].pulled
