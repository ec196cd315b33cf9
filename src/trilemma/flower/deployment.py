"""Bring a federation up, look at it, take it down: which processes each party consists of.

The server is a SuperLink, a guard in front of it and a worker; a client is a SuperNode and a worker. On one
machine `up` starts all of them on loopback; on five machines each party runs `up` on its own folder. `up`
starts what is not running, so it is also how a party recovers from a crash; a run that was under way when the
server's worker ended goes on. `attending` does so whenever a process ends.
"""

from __future__ import annotations

import socket
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trilemma.errors import UserError
from trilemma.federation import processes
from trilemma.federation.addresses import address_of
from trilemma.federation.doctor import check_start
from trilemma.federation.layout import (
    RUNNING,
    WITHOUT_FACTS,
    Party,
    parties,
    party_folders,
    without_facts,
)
from trilemma.federation.processes import Command, ProcessFailed, Running
from trilemma.federation.sizes import PIECE, ROOM
from trilemma.federation.under_way import run_under_way
from trilemma.flower import BELL, CERTIFICATE, CERTIFICATE_KEY, POLL
from trilemma.flower.files import write_flower_files
from trilemma.flower.host import forkable, host
from trilemma.flower.limits import Limits, Settings

TAKEN_DOWN = "taken-down"

START_LIMIT = 180.0
"""Seconds in which the server must listen; that one of its processes ended is noticed at once."""

Starter = Callable[[Command, Path], Running]


def commands(party: Party) -> list[Command]:
    """Return the processes of a party: the Flower process, the server's guard, the worker."""
    federation = party.federation
    environment = {
        "FLWR_HOME": str(party.flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        POLL: str(federation.timing.poll),
        BELL: str(party.running / "bell"),
    }
    if federation.on_one_machine:
        environment["OMP_NUM_THREADS"] = "1"  # parties share its cores, and would fight for them
    guard: list[Command] = []
    if party.client is None:
        program = (sys.executable, "-m", "trilemma.flower.guard", str(guard_file(party)))
        guard = [Command("guard", program, environment)]
        flower: tuple[str, ...] = (
            *(sys.executable, "-m", "trilemma.flower.superlink"),
            *("--host", "127.0.0.1", "--port", str(federation.superlink_port)),
            *("--ssl-ca-certfile", str(party.authority)),
            *("--ssl-certfile", str(party.certificate)),
            *("--ssl-keyfile", str(party.certificate_key)),
            "--enable-supernode-auth",
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", str(party.executor_secret)),
            *(("--database", str(_database(party))) if federation.durable else ()),
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
        environment |= {CERTIFICATE: str(party.certificate), CERTIFICATE_KEY: str(party.certificate_key)}
    worker = (sys.executable, "-m", "trilemma.flower.worker", str(party.folder))
    name = "superlink" if party.client is None else "supernode"
    return [Command(name, flower, environment), *guard, Command("worker", worker, environment)]


def guard_file(server: Party) -> Path:
    """Return where the guard of `server` reads its settings."""
    return server.running / "guard-settings"


def guard_settings(server: Party) -> Settings:
    """Return what the guard is told: whom to let in, and how long a reply of this configuration is."""
    from trilemma.flower.control import node_key_bytes

    federation = server.federation
    nodes = server.signed_roster.nodes
    keys = {f"client-{client}": node_key_bytes(public) for client, public in nodes.items()}
    limits = Limits(message=longest_reply(server))
    return Settings(
        listen=federation.listen or federation.host,
        port=federation.port,
        upstream=federation.superlink_port,
        authority=str(server.authority),
        certificate=str(server.certificate),
        key=str(server.certificate_key),
        peers={name: b64encode(key).decode() for name, key in keys.items()},
        limits=limits if not federation.on_one_machine else limits.for_one_address(len(keys)),
        folder=str(server.folder),
    )


def longest_reply(server: Party) -> int:
    """Return how many bytes a client of this configuration sends at a time: its longest reply, or a piece."""
    from trilemma.federation.task import load_task

    return min(load_task(server).longest_reply, PIECE + ROOM)


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
    """Start what is not running of the parties in `folder`; return what was started.

    A party without its public facts keeps no other from starting.
    """
    every = parties(folder)
    for party in every:
        taken_down(party).unlink(missing_ok=True)
    for party in every:
        if party.removed:
            say(f"{party.name}: not started, it was removed from the roster")
    started = bring_up([party for party in every if not party.removed], say)
    if lost := without_facts(folder):
        raise UserError(f"{', '.join(lost)} cannot start: {WITHOUT_FACTS}")
    return started


def bring_up(every: list[Party], say: Callable[[str], None]) -> list[Running]:
    """Start what is not running of these parties, the server first, and continue what was under way.

    Where that is much, hosts import it once, while the server starts; they then fork the SuperNodes, which
    know nothing of torch and are ready first, and the workers. A client that cannot start keeps no other from
    starting.
    """
    fresh: list[Running] = []
    hopeless: list[str] = []
    waiting: list[tuple[Party, Command]] = []

    def start(party: Party, command: Command, starter: Starter = processes.start) -> None:
        one = starter(command, party.running)
        fresh.append(one)
        say(f"{party.name}: {one.name} started, pid {one.pid}, log {one.log}")

    with host([command for party in every for command in _dead(party)]) as forking:
        for party in every:
            try:
                check_start(party, say)
            except UserError as error:
                if party.client is None:
                    raise
                hopeless.append(str(error))
                continue
            due = _due(party)
            later = [one for one in due if forking is not None and forkable(one)]
            waiting += [(party, one) for one in later]
            for one in due:
                if one not in later:
                    start(party, one)
            if party.client is None:
                _wait_for_ports(party, processes.recorded(party.running))
                _listened(party).touch()
                refresh(party, say)
                if to_continue(party).is_file():
                    _continue(party, say)
                    to_continue(party).unlink()
        for party, one in sorted(waiting, key=lambda each: each[1].name):
            assert forking is not None
            start(party, one, forking.start)
    if hopeless:
        raise UserError("\n".join(hopeless))
    return fresh


def _continue(server: Party, say: Callable[[str], None]) -> None:
    """Let a new worker go on with the run that the last one was in the middle of."""
    from trilemma.flower.control import connect

    if (run := run_under_way(server)) is not None:
        with connect(server) as control:
            control.begin_again(server.folder / "app", run)
        say(f"server: run {run!r} was under way and is continued")


def _database(server: Party) -> Path:
    """Return where the SuperLink keeps what it knows."""
    return server.state / "superlink.db"


def _listened(server: Party) -> Path:
    """Return the mark of a SuperLink that has listened once: its database is whole.

    One that is killed while it makes its tables leaves a database with which none starts again, and in which
    nothing is yet.
    """
    return server.state / "superlink-listened"


def to_continue(server: Party) -> Path:
    """Return the mark of a new worker that has not been told to go on with the run that was under way.

    Whoever started it may have died since, or another process of the server's, which came first.
    """
    return server.running / "to-continue"


def taken_down(party: Party) -> Path:
    """Return the mark of a party that somebody took down: whoever attends it leaves it so."""
    return party.running / TAKEN_DOWN


def _dead(party: Party) -> list[Command]:
    """Return those of a party's processes that do not run."""
    known = {one.name: one for one in processes.recorded(party.running)}
    return [one for one in commands(party) if one.name not in known or not processes.leads(known[one.name])]


def _due(party: Party) -> list[Command]:
    """Return what of a party is to be started, and clear the way for it.

    A SuperNode that lost its worker in the middle of a task waits for it until the task expires, so a
    client's two are restarted together. A SuperLink goes on without its worker, a worker not without its
    SuperLink; the guard does without either.
    """
    known = {one.name: one for one in processes.recorded(party.running)}
    every, dead = commands(party), _dead(party)
    if not dead:
        return []
    party.check()
    if party.client is not None or every[0] in dead:
        dead = [one for one in every if one in dead or one.name != "guard"]
    processes.stop([known[one.name] for one in dead if one.name in known], party.running)
    party.state.mkdir(exist_ok=True)
    if party.client is None:
        if every[0] in dead and not _listened(party).is_file():
            _database(party).unlink(missing_ok=True)
        write_flower_files(party)  # they name absolute paths, and the folder may have been moved
        guard_settings(party).save(guard_file(party))
        if any(one.name == "worker" for one in dead):
            party.running.mkdir(exist_ok=True)
            to_continue(party).touch()
    return dead


def start_party(party: Party) -> list[Running]:
    """Start those of a party's processes that do not run."""
    return [processes.start(command, party.running) for command in _due(party)]


def down(folder: Path, grace: float = 5.0) -> int:
    """Stop every remembered process of the parties in `folder`; return how many groups there were.

    Also those of a party that has lost its public facts since they were started.
    """
    every = [path / RUNNING for path in party_folders(folder)]
    for running in every:
        if running.is_dir():
            (running / TAKEN_DOWN).touch()
    found = {running: processes.recorded(running) for running in every}
    # All of them at once: stopping ten parties one after the other would take a minute.
    for known in found.values():
        processes.signal_all(known)
    for running, known in found.items():
        processes.stop(known, running, grace)
    return sum(map(len, found.values()))


def _wait_for_ports(server: Party, running: list[Running]) -> None:
    """Wait until guard and SuperLink listen; say which process ended instead, and with what last words."""
    federation = server.federation
    open_to_all = federation.listen in ("0.0.0.0", "::")
    door = "localhost" if open_to_all else federation.listen or federation.host
    deadline = time.monotonic() + START_LIMIT
    waiting = [("127.0.0.1", federation.superlink_port), (door, federation.port)]
    while waiting and time.monotonic() < deadline:
        dead = [one for one in running if not processes.leads(one)]
        if dead:
            raise ProcessFailed(f"{dead[0].name} ended at once; its log:\n{processes.tail(dead[0].log)}")
        try:
            socket.create_connection(waiting[0], timeout=1.0).close()
            waiting = waiting[1:]
        except OSError:
            time.sleep(0.1)
    if waiting:
        raise ProcessFailed(f"nobody listens at {address_of(*waiting[0])} after {START_LIMIT:.0f} s")


def refresh(server: Party, say: Callable[[str], None] = lambda _: None) -> None:
    """Let the server's running processes know of its roster and certificate: the guard, and the SuperLink.

    The server's app looks for itself, before every round.
    """
    from trilemma.flower.control import connect

    if not any(processes.leads(one) for one in processes.recorded(server.running)):
        return
    guard_settings(server).save(guard_file(server))
    with connect(server) as control:
        new, gone = control.register(list(server.signed_roster.nodes.values()))
    if new:
        say(f"server: {new} node keys registered")
    if gone:
        say(f"server: {gone} node keys unregistered")


def restart(party: Party) -> bool:
    """Start a party's processes anew where some run: they read keys and certificates when they start."""
    running = [one for one in processes.recorded(party.running) if processes.leads(one)]
    if not running:
        return False
    processes.stop(processes.recorded(party.running), party.running)
    start_party(party)
    return True
