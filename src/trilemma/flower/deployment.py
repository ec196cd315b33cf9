"""Bring a federation up, look at it, take it down: which processes each party consists of.

The server is a SuperLink and a worker; a client is a SuperNode and a worker. On one machine `up` starts all
of them on loopback; on five machines each party runs `up` on its own folder. `up` starts what is not running,
so it is also how a party recovers from a crash.
"""

from __future__ import annotations

import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trilemma.federation import processes
from trilemma.federation.layout import Party, parties
from trilemma.federation.processes import Command, ProcessFailed, Running
from trilemma.flower import POLL
from trilemma.flower.files import write_flower_files

SCRIPTS = Path(sysconfig.get_path("scripts"))
START_LIMIT = 60.0


def commands(party: Party) -> list[Command]:
    """Return the processes of a party, the Flower process first."""
    federation = party.federation
    environment = {
        "FLWR_HOME": str(party.flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        POLL: str(federation.timing.poll),
        # Parties share a machine in a pilot: one thread each, or they fight for the cores.
        "OMP_NUM_THREADS": "1",
    }
    secrets = party.folder / "secrets"
    if party.client is None:
        flower: tuple[str, ...] = (
            str(SCRIPTS / "flower-superlink"),
            *("--host", federation.listen or federation.host, "--port", str(federation.port)),
            *("--ssl-ca-certfile", str(party.authority)),
            *("--ssl-certfile", str(party.folder / "tls" / "server.crt")),
            *("--ssl-keyfile", str(secrets / "server.key")),
            "--enable-supernode-auth",
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(party.executor_secret)),
            *(("--database", str(party.state / "superlink.db")) if federation.durable else ()),
            "--disable-runtime-dependency-installation",
        )
    else:
        flower = (
            *(sys.executable, "-m", "trilemma.flower.supernode"),
            *("--superlink", federation.address),
            *("--root-certificates", str(party.authority)),
            *("--auth-supernode-private-key", str(party.node_key)),
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(party.executor_secret)),
            *("--host", "127.0.0.1", "--port", str(federation.runtime_port(party.client))),
        )
    worker = (sys.executable, "-m", "trilemma.flower.worker", str(party.folder))
    name = "superlink" if party.client is None else "supernode"
    return [Command(name, flower, environment), Command("worker", worker, environment)]


@dataclass(frozen=True)
class Status:
    """One process of a party."""

    party: str
    process: str
    pid: int
    alive: bool


def status(folder: Path) -> list[Status]:
    """Return the state of every remembered process of the parties in `folder`."""
    return [
        Status(party.name, known.name, known.pid, processes.leads(known))
        for party in parties(folder)
        for known in processes.recorded(party.running)
    ]


def up(folder: Path, say: Callable[[str], None] = lambda _: None) -> list[Running]:
    """Start what is not running of the parties in `folder`; return what was started."""
    started: list[Running] = []
    for party in parties(folder):
        fresh = start_party(party)
        for one in fresh:
            say(f"{party.name}: {one.name} started, pid {one.pid}, log {one.log}")
        if party.client is None:
            _wait_for_port(party, processes.recorded(party.running))
            _register(party, say)
        started += fresh
    return started


def start_party(party: Party) -> list[Running]:
    """Start those of a party's processes that do not run.

    A SuperNode that lost its worker in the middle of a task waits for it until the task expires, so a
    client's two are restarted together. A SuperLink goes on without its worker, a worker not without its
    SuperLink.
    """
    known = {one.name: one for one in processes.recorded(party.running)}
    flower, worker = commands(party)
    dead = [one for one in (flower, worker) if one.name not in known or not processes.leads(known[one.name])]
    if not dead:
        return []
    if party.client is not None or flower in dead:
        dead = [flower, worker]
    party.check()
    processes.stop([known[one.name] for one in dead if one.name in known], party.running)
    party.state.mkdir(exist_ok=True)
    if party.client is None:
        write_flower_files(party)  # they name absolute paths, and the folder may have been moved
    return [processes.start(command, party.running) for command in dead]


def down(folder: Path, grace: float = 5.0) -> int:
    """Stop every remembered process of the parties in `folder`; return how many groups there were."""
    found = [(party, known) for party in parties(folder) for known in processes.recorded(party.running)]
    # All workers first and all at once: stopping ten parties one after the other would take a minute.
    for party in {party.name: party for party, _ in found}.values():
        processes.signal_all([known for owner, known in found if owner == party])
    for party in {party.name: party for party, _ in found}.values():
        processes.stop([known for owner, known in found if owner == party], party.running, grace)
    return len(found)


def attend(folder: Path, interval: float = 1.0) -> None:
    """Stay until a process of the parties in `folder` ends, or until told to stop; then take all down.

    For supervisors that expect a process to stay in the foreground, such as systemd and Docker.
    """

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        while True:
            dead = [one for one in status(folder) if not one.alive]
            if dead:
                raise ProcessFailed(f"{dead[0].party}: {dead[0].process} (pid {dead[0].pid}) ended")
            time.sleep(interval)
    finally:
        down(folder)


def _wait_for_port(server: Party, running: list[Running]) -> None:
    federation = server.federation
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        dead = [one for one in running if not processes.leads(one)]
        if dead:
            raise ProcessFailed(f"{dead[0].name} ended at once; its log:\n{processes.tail(dead[0].log)}")
        try:
            socket.create_connection((federation.host, federation.port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.1)
    raise ProcessFailed(f"no SuperLink at {federation.address} after {START_LIMIT:.0f} s")


def _register(server: Party, say: Callable[[str], None]) -> None:
    from trilemma.flower.control import connect

    with connect(server) as control:
        new = control.register(list(server.nodes().values()))
    if new:
        say(f"server: {new} node keys registered")
