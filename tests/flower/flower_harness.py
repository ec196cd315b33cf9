"""Real federations on loopback: brought up, disturbed, and taken down whatever happens."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from federation_harness import make
from free_ports import free_ports
from trilemma.federation import processes, public_facts
from trilemma.federation.commits import CommitLog
from trilemma.federation.layout import Party
from trilemma.federation.processes import Command
from trilemma.federation.public_facts import Timing
from trilemma.flower import SILENCE, deployment
from trilemma.flower.control import connect

FAST = Timing(round_limit=30.0, join_limit=180.0, poll=0.2)
LIAR = Path(__file__).with_name("flower_liar.py")
DEAF = Path(__file__).with_name("flower_deaf.py")


@dataclass
class Real:
    """A real federation on loopback."""

    folder: Path
    parties: list[Party]

    @property
    def server(self) -> Party:
        return self.parties[0]

    def client(self, number: int) -> Party:
        return self.parties[1 + number]

    def log(self, run: str) -> CommitLog:
        return CommitLog(self.server.run_folder(run))

    def start(self, run: str) -> int:
        with connect(self.server) as control:
            for old in control.active():
                control.stop(old)
            return control.start(self.server.folder / "app", run)

    def wait(self, flower_run: int, limit: float = 240.0) -> str:
        """Wait for the end of a run; return how it ended."""
        deadline = time.monotonic() + limit
        with connect(self.server) as control:
            while time.monotonic() < deadline:
                status = control.status(flower_run)
                if status.startswith("finished"):
                    return status
                time.sleep(0.2)
        raise AssertionError(f"the run did not end in {limit} s; the server says:\n{self.said(40)}")

    def go(self, run: str, limit: float = 240.0) -> list[dict]:
        """Run to the end; return the records."""
        status = self.wait(self.start(run), limit)
        assert status == "finished:completed", f"{status}\n{self.said(40)}"
        return self.log(run).records()

    def said(self, lines: int = 400) -> str:
        return processes.tail(str(self.server.running / "worker.log"), lines)

    def process(self, party: Party, name: str) -> processes.Running:
        return next(one for one in processes.recorded(party.running) if one.name == name)

    def kill(self, party: Party, name: str) -> None:
        """kill -9, the whole group, nothing polite about it."""
        one = self.process(party, name)
        processes.signal_all([one], processes.signal.SIGKILL)
        wait_for(lambda: not processes.members(one), 60.0)

    @contextlib.contextmanager
    def liar(self, number: int, how: str) -> Iterator[None]:
        """Let client `number` lie, as `flower_liar.py` says."""
        party = self.client(number)
        self.restart(party, (sys.executable, str(LIAR), str(party.folder), how))
        try:
            yield
        finally:
            self.restart(party)

    @contextlib.contextmanager
    def deaf(self, number: int) -> Iterator[None]:
        """Let the SuperNode of client `number` break when it first asks for work (`flower_deaf.py`)."""
        party = self.client(number)
        supernode = deployment.commands(party)[0]
        argv = (sys.executable, str(DEAF), *supernode.argv[3:])
        environment = {**supernode.environment, SILENCE: "3"}
        self.restart(party, supernode=replace(supernode, argv=argv, environment=environment))
        try:
            yield
        finally:
            self.restart(party)

    def restart(
        self, party: Party, worker: tuple[str, ...] | None = None, supernode: Command | None = None
    ) -> None:
        """Start a party's processes afresh, perhaps with another worker or SuperNode."""
        processes.stop(processes.recorded(party.running), party.running, grace=2.0)
        for command in deployment.commands(party):
            if command.name == "worker" and worker is not None:
                command = replace(command, argv=worker)
            if command.name == "supernode" and supernode is not None:
                command = supernode
            processes.start(command, party.running)

    def set_timing(self, **changes: float) -> None:
        """Change the server's patience for the runs to come; it is no part of what parties agree on."""
        facts = self.server.federation
        changed = replace(facts, timing=replace(facts.timing, **changes))
        (self.server.folder / public_facts.PUBLIC).write_text(changed.toml())


@contextlib.contextmanager
def real(folder: Path, clients: int, config: str, **options: object) -> Iterator[Real]:
    """Bring a federation up, and down again whatever happens."""
    parties = make(folder, clients, config, **{"timing": FAST, "port": free_ports(clients), **options})
    try:
        deployment.up(folder)
        yield Real(folder, parties)
    finally:
        deployment.down(folder, grace=2.0)
    assert deployment.status(folder) == []


def wait_for(condition: Callable[[], object], limit: float) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen in {limit} s")
        time.sleep(0.05)
