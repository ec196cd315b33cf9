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
from trilemma.federation.operations import deployment
from trilemma.federation.party import public_facts
from trilemma.federation.party.layout import PROCESS, Party
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.processes import groups as processes
from trilemma.federation.processes.door import ask
from trilemma.federation.processes.groups import Command
from trilemma.federation.server.commits import CommitLog

FAST = Timing(round_limit=30.0, join_limit=180.0, poll=0.2)
LIAR = Path(__file__).with_name("deployed_liar.py")


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

    def start(self, run: str) -> None:
        """Begin a run, or go on with it, and leave it alone."""
        next(ask(self.server, seconds=60.0, ask="run", run=run, replace=True, shown=-1))

    def status(self) -> dict:
        """What the server's process says."""
        (told,) = ask(self.server, seconds=60.0, ask="status")
        return told

    def wait(self, run: str, limit: float = 240.0) -> str:
        """Wait until a run has ended; return how."""
        deadline, told = time.monotonic() + limit, {"state": "running"}
        while told["state"] == "running":
            left = deadline - time.monotonic()
            assert left > 0, f"the run did not end in {limit} s; the server says:\n{self.said(40)}"
            told = self.status()["run"]
            time.sleep(0.1)
        assert told["name"] == run
        return told["state"]

    def go(self, run: str, limit: float = 240.0) -> list[dict]:
        """Run to the end; return the records."""
        self.start(run)
        state = self.wait(run, limit)
        assert state == "completed", f"{state}\n{self.said(40)}"
        return self.log(run).records()

    def said(self, lines: int = 400) -> str:
        return processes.tail(str(self.server.process_log), lines)

    def process(self, party: Party) -> processes.Running:
        (one,) = processes.recorded(party.running)
        return one

    def kill(self, party: Party) -> None:
        """kill -9, the whole group, nothing polite about it."""
        one = self.process(party)
        processes.signal_all([one], processes.signal.SIGKILL)
        wait_for(lambda: not processes.members(one), 60.0)

    @contextlib.contextmanager
    def liar(self, number: int, *how: str) -> Iterator[None]:
        """Let client `number` lie, as `deployed_liar.py` says."""
        party = self.client(number)
        self.restart(party, (sys.executable, str(LIAR), str(party.folder), *how))
        try:
            yield
        finally:
            self.restart(party)

    def restart(self, party: Party, program: tuple[str, ...] | None = None) -> None:
        """Start a party's process afresh, perhaps with another program."""
        processes.stop(processes.recorded(party.running), party.running, grace=2.0)
        party.ready.unlink(missing_ok=True)
        own = deployment.command(party)
        started = processes.spawn(own if program is None else replace(own, argv=program), party.running)
        wait_for(lambda: party.ready.exists() or not processes.leads(started), 60.0)

    def set_timing(self, **changes: float) -> None:
        """Change the server's patience for the runs to come; it is no part of what parties agree on."""
        facts = self.server.federation
        changed = replace(facts, timing=replace(facts.timing, **changes))
        (self.server.folder / public_facts.PUBLIC).write_text(changed.toml())


@contextlib.contextmanager
def real(folder: Path, clients: int, config: str, **options: object) -> Iterator[Real]:
    """Bring a federation up, and down again whatever happens."""
    parties = make(folder, clients, config, **{"timing": FAST, "port": free_ports(1), **options})
    try:
        deployment.up(folder)
        yield Real(folder, parties)
    finally:
        deployment.down(folder, grace=2.0)
    assert [processes.recorded(party.running) for party in parties] == [[]] * len(parties)


def wait_for(condition: Callable[[], object], limit: float) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen in {limit} s")
        time.sleep(0.05)


def sleeper(party: Party) -> processes.Running:
    """Something that is recorded as a party's process and does nothing."""
    return processes.start(Command(PROCESS, ("sleep", "600")), party.running)
