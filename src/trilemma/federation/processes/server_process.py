"""The server's process: the door that clients come through, the operator's door, and one run at a time.

A run that was under way when the process ended, however it ended, goes on when it starts again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from trilemma.base.errors import UserError
from trilemma.federation.carriers.grpc.credentials import Tls
from trilemma.federation.carriers.grpc.server import GrpcServer
from trilemma.federation.party.addresses import address_of
from trilemma.federation.party.facts import Facts
from trilemma.federation.party.layout import Party
from trilemma.federation.processes.door import Door
from trilemma.federation.processes.logs import listener, log
from trilemma.federation.protocol import events
from trilemma.federation.protocol.events import Event
from trilemma.federation.protocol.reasons import Reason, reason_for
from trilemma.federation.server.exchange import Clock
from trilemma.federation.server.under_way import run_under_way, under_way

RUNNING, COMPLETED, FAILED, STOPPED = "running", "completed", "failed", "stopped"
"""States of a run."""

LOOK = 30.0
"""Seconds after which a command that follows a run is told that nothing happened, so that it may go."""

PATIENCE = 60.0
"""Seconds for a run that is told to stop: it ends before its next question."""


GRACE = 2.0
"""Seconds for a run that breaks off because the process ends."""


class StoppedError(Exception):
    """The operator stopped the run: it is not under way any more."""


class EndsError(Exception):
    """The process ends: the run goes on with the next one."""


@dataclass(eq=False)
class Run:
    """A run of this process."""

    name: str
    state: str = RUNNING
    reason: str = ""
    stop: threading.Event = field(default_factory=threading.Event)


class Server:
    """The runs of a server, one at a time, over a carrier."""

    def __init__(self, party: Party, carrier: GrpcServer, ends: threading.Event) -> None:
        self.party, self.carrier, self._ends = party, carrier, ends
        self._changed = threading.Condition()
        self._run: Run | None = None
        self._work: threading.Thread | None = None
        self._commits = 0

    # --- the operator -----------------------------------------------------------------------------------

    def answer(self, question: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Answer a question that came through the operator's door."""
        match question["ask"]:
            case "run":
                yield from self._follow(str(question["run"]), bool(question["replace"]), question["shown"])
            case "status":
                yield self._status()
            case "stop":
                self.stop()
            case "refresh":
                self.carrier.nodes()  # ends the streams of those who are not on the roster any more
            case other:
                raise UserError(f"{other!r} is nothing that a server of this version can be asked")

    def _status(self) -> Mapping[str, Any]:
        run = self._run
        there = {str(client): asdict(one) for client, one in self.carrier.presence().items()}
        return {
            "run": None if run is None else {"name": run.name, "state": run.state, "reason": run.reason},
            "there": there,
            "turned_away": {str(client): why for client, why in self.carrier.turned_away().items()},
        }

    def _follow(self, name: str, replace: bool, shown: int) -> Iterator[Mapping[str, Any]]:
        """Begin a run and tell its records as they are committed, then its end.

        Those after the first `shown`; where that is negative, those that are new.
        """
        from trilemma.federation.server.commits import CommitLog

        log = CommitLog(self.party.run_folder(name))
        shown = shown if shown >= 0 else len(log.records())
        run, heard = self.begin(name, replace), -1
        while True:
            with self._changed:
                while run.state == RUNNING and self._commits == heard:
                    if not self._changed.wait(LOOK):
                        break
                state, heard = run.state, self._commits
            for record in log.records()[shown:]:
                shown += 1
                yield {"record": record, "shown": shown}
            yield {"state": state, "reason": run.reason, "shown": shown}
            if state != RUNNING:
                return

    # --- runs -------------------------------------------------------------------------------------------

    def begin(self, name: str, replace: bool = False) -> Run:
        """Begin a run, or return it where it is under way. Another one is stopped if told so."""
        self.party.run_folder(name)  # refuses what is no name
        with self._changed:
            run = self._run
            if run is not None and run.state == RUNNING:
                if run.name == name:
                    return run
                if not replace:
                    raise UserError(
                        f"run {run.name!r} is under way and is not stopped unasked: wait for its end, or say "
                        "--replace"
                    )
                self._stop(run)
            run = self._run = Run(name)
        self._work = threading.Thread(target=self._go, args=(run,), daemon=True)
        self._work.start()
        return run

    def stop(self) -> None:
        """Stop the run that is under way, if there is one."""
        with self._changed:
            if self._run is not None and self._run.state == RUNNING:
                self._stop(self._run)

    def _stop(self, run: Run) -> None:
        run.stop.set()
        if not self._changed.wait_for(lambda: run.state != RUNNING, PATIENCE):
            raise UserError(f"run {run.name!r} was told to stop, and has not yet; see it with `status`")

    def close(self) -> None:
        """Let the run that is under way break off; it goes on, and is followed on, when this starts again."""
        if self._work is not None:
            self._work.join(GRACE)

    def _go(self, run: Run) -> None:
        state, reason = COMPLETED, ""
        try:
            with under_way(self.party, run.name, (EndsError,)):
                self._coordinate(run)
        except EndsError:
            return
        except StoppedError:
            state = STOPPED
        except Exception as error:
            log.error("run %r failed", run.name, exc_info=error)
            listener(self.party, run.name)(events.RUN_FAILED(error=type(error).__name__))
            state, reason = FAILED, what_an_operator_reads(error)
        with self._changed:
            run.state, run.reason = state, reason
            self._changed.notify_all()

    def _coordinate(self, run: Run) -> None:
        """Run the federation's configuration to its end."""
        from trilemma.federation.server.coordinator import open_run  # and torch, when a run begins

        clock = Clock(sleep=partial(self._pause, run))
        coordinator = open_run(self.party, run.name, self.carrier, partial(self._say, run), clock)
        self.carrier.longest = coordinator.task.longest_reply
        coordinator.go()

    def _pause(self, run: Run, seconds: float) -> None:
        """Wait until something came, for so many seconds at most."""
        self.carrier.wait(seconds)
        if run.stop.is_set():
            raise StoppedError
        if self._ends.is_set():
            raise EndsError

    def _say(self, run: Run, event: Event) -> None:
        listener(self.party, run.name)(event)
        if event.code == events.ROUND_COMMITTED.code:
            with self._changed:
                self._commits += 1
                self._changed.notify_all()


def serve(party: Party, stop: threading.Event) -> None:
    """Be the server until told to stop."""
    federation, say = party.federation, listener(party)
    listen = (federation.listen or federation.host, federation.port)
    tls = Tls(party.certificate, party.certificate_key, party.authority)
    spool, facts = party.state / "arriving", lambda: Facts.of(party).text
    with GrpcServer.open(listen, tls, lambda: party.signed_roster.tls, spool, facts=facts) as carrier:
        server = Server(party, carrier, stop)
        door = Door(party, server.answer)
        say(events.LISTENS(address=address_of(*listen), clients=len(party.signed_roster.tls)))
        if (run := run_under_way(party)) is not None:
            log.info("run %r was under way and is continued", run)
            server.begin(run)
        party.ready.touch()
        stop.wait()
        door.close()
        server.close()


def what_an_operator_reads(error: Exception) -> str:
    """Return what is said about a run that failed: our own sentences, not a task.py's.

    >>> what_an_operator_reads(UserError("2 of 5 clients joined"))
    '2 of 5 clients joined'
    >>> what_an_operator_reads(ValueError("patient 4711 has no label"))
    'ValueError'
    >>> import errno
    >>> what_an_operator_reads(OSError(errno.ENOSPC, "No space left on device"))
    'No space left on device: make room where the server writes, and run it again; it goes on where it was'
    """
    if reason_for(error) is Reason.DISK:
        assert isinstance(error, OSError)
        why = os.strerror(error.errno or 0)
        return f"{why}: make room where the server writes, and run it again; it goes on where it was"
    own = isinstance(error, UserError) and error.__cause__ is None
    return str(error)[:4000] if own else type(error).__name__
