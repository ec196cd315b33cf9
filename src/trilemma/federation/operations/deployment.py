"""Bring a federation up and take it down: one process for each party.

On one machine `up` starts all of them on loopback; on five machines each party runs `up` on its own folder.
`up` starts what is not running, so it is also how a party recovers from a crash. Whoever starts or stops a
party's process holds a lock in its folder meanwhile, so two of them cannot be in each other's way.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.operations.doctor import check_start
from trilemma.federation.party.layout import (
    PROCESS,
    RUNNING,
    WITHOUT_FACTS,
    Party,
    parties,
    party_folders,
    without_facts,
)
from trilemma.federation.processes import groups as processes
from trilemma.federation.processes.door import ask
from trilemma.federation.processes.fork_server import PROGRAM, ForkServer, fork_server
from trilemma.federation.processes.groups import Command, ProcessFailed, Running

TAKEN_DOWN = "taken-down"

START_LIMIT = 180.0
"""Seconds in which a process must be there; that it ended is noticed at once."""

ENOUGH = 6
"""How often a process may end within a minute and be started again."""

Say = Callable[[str], None]


def command(party: Party) -> Command:
    """Return how a party's process is started."""
    # Parties on one machine share its cores, and would fight for them.
    environment = {"OMP_NUM_THREADS": "1"} if party.federation.on_one_machine else {}
    return Command(PROCESS, (sys.executable, "-m", PROGRAM, str(party.folder)), environment)


def running(party: Party) -> Running | None:
    """Return a party's process, where it lives."""
    return next((one for one in processes.recorded(party.running) if processes.leads(one)), None)


@contextmanager
def _alone(folders: Iterable[Path]) -> Iterator[None]:
    """Keep everybody else from starting and stopping what runs in these folders; they are told in order."""
    with ExitStack() as locks:
        for running in folders:
            running.mkdir(exist_ok=True)
            locks.enter_context(files.locked(running / "starting.lock"))
        yield


def up(folder: Path, say: Say = lambda _: None) -> list[Running]:
    """Start what is not running of the parties in `folder`; return what was started.

    A party without its public facts keeps no other from starting.
    """
    every = parties(folder)
    for party in every:
        taken_down(party).unlink(missing_ok=True)
        if party.removed:
            say(f"{party.name}: not started, it was removed from the roster")
    started = bring_up([party for party in every if not party.removed], say)
    if lost := without_facts(folder):
        raise UserError(f"{', '.join(lost)} cannot start: {WITHOUT_FACTS}")
    return started


def bring_up(every: list[Party], say: Say) -> list[Running]:
    """Start what is not running of these parties, the server first, and wait until it is there.

    Where they are many, a fork server imports once what all of them need. A client that cannot start keeps no
    other from starting.
    """
    with _alone(party.running for party in every):
        dead = [party for party in every if running(party) is None]
        servers = [party for party in dead if party.client is None]
        clients = [party for party in dead if party.client is not None]
        environment = command(dead[0]).environment if dead else {}
        with fork_server(len(dead), environment) as forking:
            started = [(party, _start(party, forking, say)) for party in servers]
            for party, one in started:
                _await(party, one)
            hopeless: list[str] = []
            for party in clients:
                try:
                    started.append((party, _start(party, forking, say)))
                except UserError as error:
                    hopeless.append(str(error))
            for party, one in started:
                try:
                    _await(party, one)
                except ProcessFailed as error:
                    hopeless.append(str(error))
    if hopeless:
        raise UserError("\n".join(hopeless))
    return [one for _, one in started]


def _start(party: Party, forking: ForkServer | None, say: Say) -> Running:
    check_start(party, say)
    processes.stop(processes.recorded(party.running), party.running)  # what a dead leader left behind
    party.ready.unlink(missing_ok=True)
    spawn = processes.spawn if forking is None else forking.spawn
    one = spawn(command(party), party.running)
    say(f"{party.name}: started, pid {one.pid}, log {one.log}")
    return one


def _await(party: Party, one: Running) -> None:
    """Wait until a process is there, or say with what last words it ended."""
    deadline = time.monotonic() + START_LIMIT
    while not party.ready.exists():
        if not processes.leads(one):
            processes.stop([one], party.running)
            raise ProcessFailed(
                f"{party.name} ended at once: {processes.tail(one.log, 1)} (more in {one.log})"
            )
        if time.monotonic() > deadline:
            raise ProcessFailed(f"{party.name} is not there after {START_LIMIT:.0f} s; see {one.log}")
        time.sleep(0.02)


def down(folder: Path, grace: float = 5.0) -> int:
    """Stop every process of the parties in `folder`; return how many there were.

    Also those of a party that has lost its public facts since they were started.
    """
    every = [path / RUNNING for path in party_folders(folder) if (path / RUNNING).is_dir()]
    for running in every:
        (running / TAKEN_DOWN).touch()
    with _alone(every):
        found = {running: processes.recorded(running) for running in every}
        # All of them at once: stopping ten parties one after the other would take a minute.
        for known in found.values():
            processes.signal_all(known)
        for running, known in found.items():
            processes.stop(known, running, grace)
    return sum(map(len, found.values()))


def taken_down(party: Party) -> Path:
    """Return the mark of a party that somebody took down: whoever attends it leaves it so."""
    return party.running / TAKEN_DOWN


def refresh(server: Party) -> None:
    """Let the server's process know of its roster at once; it looks every second."""
    if running(server) is not None:
        list(ask(server, seconds=START_LIMIT, ask="refresh"))


def restart(party: Party, say: Say = lambda _: None) -> bool:
    """Start a party's process anew where one runs: it reads keys and configuration when it starts."""
    if (one := running(party)) is None:
        return False
    with _alone([party.running]):
        processes.stop([one], party.running)
    bring_up([party], say)
    return True


# --- staying with them ------------------------------------------------------------------------------------


def supervise(folder: Path, interval: float = 1.0, say: Say = lambda _: None) -> None:
    """Stay, and start again what ends of the parties in `folder`, until told to stop; then take all down.

    For supervisors that expect a process to stay in the foreground, such as systemd and Docker. A party that
    somebody takes down meanwhile stays down. What ends `ENOUGH` times in a minute does not mend by being
    started again: then this ends too, and says what it saw last.
    """

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    ends: list[tuple[float, str]] = []
    try:
        while supervised := [
            one for one in parties(folder) if not one.removed and not taken_down(one).exists()
        ]:
            ends = revive(supervised, ends, say)
            time.sleep(interval)
    finally:
        down(folder)


def revive(every: list[Party], ends: list[tuple[float, str]], say: Say) -> list[tuple[float, str]]:
    """Start again what ended of these parties; return what has ended in the last minute, and when.

    The server first, then all clients at once. A server that cannot start keeps no client waiting.
    """
    now = time.monotonic()
    ends = [(when, what) for when, what in ends if now - when < 60.0]
    lacking = [party for party in every if running(party) is None]
    for party in lacking:
        ends.append((now, party.name))
        say(f"{party.name}: its process ended and is started again")
        if sum(what == party.name for _, what in ends) >= ENOUGH:
            last = processes.tail(str(party.process_log))
            raise ProcessFailed(f"{party.name} keeps ending; its log:\n{last}")
    servers = [party for party in lacking if party.client is None]
    for together in (servers, [party for party in lacking if party.client is not None]):
        try:
            bring_up(together, say)
        except UserError as error:  # something ended meanwhile: the next look finds it
            say(f"{', '.join(party.name for party in together)}: {error}")
    return ends
