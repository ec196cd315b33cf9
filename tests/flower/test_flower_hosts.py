"""Five machines, as far as one can be five: network namespaces with a cable each to one switch.

What is on loopback on one host cannot be reached from another, so this finds whatever counts on one machine.
Cables are unplugged, and where the kernel has netem (`tc`) they are slow and lose packets. It takes the right
to make namespaces; without it the tests are skipped and say so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flower_harness import Real, wait_for

from federation_harness import PRIVATE, make, small_config
from trilemma.federation.layout import Timing
from trilemma.federation.permission import Permission
from trilemma.flower import deployment

pytestmark = [pytest.mark.federation, pytest.mark.slow]

CLIENTS = 4
TIMING = Timing(round_limit=8.0, join_limit=60.0, poll=0.2)


def ip(*words: str, host: str | None = None) -> None:
    """Say something to `ip`, on a host; what it complains about is the reason to skip."""
    inside = () if host is None else ("-netns", host)
    told = subprocess.run(["ip", *inside, *words], capture_output=True, text=True, timeout=20)
    if told.returncode:
        raise OSError(f"ip {' '.join(words)}: {told.stderr.strip()}")


class Hosts:
    """Five hosts and a switch; host 0 is the server's."""

    def __init__(self) -> None:
        self.switch = f"tri{os.getpid()}"
        self.names = [f"{self.switch}-{number}" for number in range(1 + CLIENTS)]

    @contextlib.contextmanager
    def plugged_in(self) -> Iterator[Hosts]:
        with contextlib.ExitStack() as stack:
            for name in (self.switch, *self.names):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
                ip("link", "set", "lo", "up", host=name)
            ip("link", "add", "switch", "type", "bridge", host=self.switch)
            ip("link", "set", "switch", "up", host=self.switch)
            for number, name in enumerate(self.names):
                ip(
                    "link",
                    "add",
                    f"port{number}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    name,
                    host=self.switch,
                )
                ip("link", "set", f"port{number}", "master", "switch", "up", host=self.switch)
                ip("address", "add", f"{self.address(number)}/24", "dev", "eth0", host=name)
                ip("link", "set", "eth0", "up", host=name)
            yield self

    def address(self, number: int) -> str:
        return f"10.77.13.{number + 1}"

    def plug(self, number: int, state: str) -> None:
        """Put a host's cable in (`up`), or pull it out (`down`)."""
        ip("link", "set", f"port{number}", state, host=self.switch)

    def make_worse(self, delay: str, loss: str) -> None:
        """Let every cable be slow and lose packets, both ways."""
        for name in self.names:
            told = subprocess.run(
                [
                    "ip",
                    "netns",
                    "exec",
                    name,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    "eth0",
                    "root",
                    "netem",
                    "delay",
                    delay,
                    "loss",
                    loss,
                ],
                capture_output=True,
                text=True,
                timeout=20,
            )
            if told.returncode:
                raise OSError(f"tc netem: {told.stderr.strip()}")

    def on(self, number: int, *arguments: str) -> list[str]:
        """A command of ours, as it is typed on a host."""
        return [
            "ip",
            "netns",
            "exec",
            self.names[number],
            sys.executable,
            "-m",
            "trilemma",
            "federation",
            *arguments,
        ]


@pytest.fixture
def hosts():
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here")
    with contextlib.ExitStack() as stack:
        try:
            plugged = stack.enter_context(Hosts().plugged_in())
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield plugged


@contextlib.contextmanager
def federation(folder: Path, hosts: Hosts, rounds: int) -> Iterator[Real]:
    """A federation whose parties are on hosts of their own, each brought up there."""
    config = small_config(CLIENTS, *PRIVATE, rounds=rounds)
    parties = make(
        folder, CLIENTS, config, budget=1e6, timing=TIMING, host=hosts.address(0), listen="0.0.0.0", port=9190
    )
    for party in parties[1:]:
        Permission().with_plan(party.plan).save(party.allowed)
    try:
        for number, party in enumerate(parties):
            subprocess.run(
                hosts.on(number, "up", str(party.folder)), check=True, timeout=120, stdout=subprocess.DEVNULL
            )
        yield Real(folder, parties)
    finally:
        deployment.down(folder, grace=2.0)


def test_five_hosts_and_one_is_cut_off_for_a_while(tmp_path, hosts):
    """The others go on without it; plugged in again, it is heard again."""
    with federation(tmp_path / "federation", hosts, rounds=6) as real:
        log = real.log("cut")
        run = hosts.on(0, "run", str(real.server.folder), "--name", "cut", "--limit", "200")
        with subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
            wait_for(lambda: len(log.records()) >= 1, 120.0)
            hosts.plug(CLIENTS, "down")
            wait_for(lambda: log.records()[-1]["absent"] == [CLIENTS - 1], 60.0)
            hosts.plug(CLIENTS, "up")
            assert running.wait(timeout=150) == 0, running.stderr.read()
        assert [record["round"] for record in log.records()] == [1, 2, 3, 4, 5, 6]
        assert all(record["epoch"] == 0 for record in log.records())
        again = hosts.on(0, "run", str(real.server.folder), "--name", "again", "--limit", "150")
        subprocess.run(again, check=True, timeout=170, stdout=subprocess.DEVNULL)
        assert real.log("again").records()[-1]["absent"] == []


def test_five_hosts_with_slow_cables_that_lose_packets(tmp_path, hosts):
    try:
        hosts.make_worse("40ms", "2%")
    except OSError as error:
        pytest.skip(f"no netem here: {error}")
    with federation(tmp_path / "federation", hosts, rounds=3) as real:
        run = hosts.on(0, "run", str(real.server.folder), "--limit", "150")
        subprocess.run(run, check=True, timeout=170, stdout=subprocess.DEVNULL)
        assert [record["round"] for record in real.log("default").records()] == [1, 2, 3]
