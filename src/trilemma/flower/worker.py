"""The process that does a party's work: it takes tasks from the party's Flower process and runs OUR apps.

    python -m trilemma.flower.worker FOLDER          (a party's folder)

Flower's default starts a new Python for every message and runs the code the server uploaded. Both are wrong
here. A process per message costs seconds of imports per client and round; and a client that runs the
server's code is protected from nothing: that code could read the identity key. This worker stays up, and runs
the apps of the package installed on its own machine, whatever the upload says. Flower knows this arrangement
as process isolation; the worker speaks the same protocol as `flower-superexec` with `flwr-clientapp` and
`flwr-serverapp` (`internals.Tasks`), with a secret shared between it and the party's Flower process.

A client waits longer than it works. Until the first block comes its worker has not imported torch; when no
block has come for a while it replaces itself by the same program, in the same process, which then has not
either. All that a client must remember is on its disk.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from trilemma.errors import UserError
from trilemma.federation import events
from trilemma.federation.facts import installed
from trilemma.federation.layout import Party
from trilemma.federation.reasons import Reason, Refused, reason_for, what_travels
from trilemma.flower import BELL, REST
from trilemma.flower.bell import Bell
from trilemma.flower.client_app import PARTY
from trilemma.flower.client_app import app as client_app
from trilemma.flower.internals import BROKEN_OFF, Tasks, bound_pulls
from trilemma.flower.short_logs import keep_short
from trilemma.flower.telling import telling

log = logging.getLogger("flwr")  # Flower's own: a party's log is one story


LONGEST_WAIT = 2.0
"""Seconds after which a client's worker asks for tasks though no bell has rung."""


class Worker:
    """Takes a party's tasks and runs them; after `rest` seconds without any, `at_rest` is called.

    Where there is a `bell` it is rung when there is a task.
    """

    def __init__(
        self,
        tasks: Tasks,
        poll: float,
        rest: float = math.inf,
        at_rest: Callable[[], None] = lambda: None,
        say: events.Say = events.silent,
        bell: Bell | None = None,
    ) -> None:
        self.tasks, self.say, self.bell = tasks, say, bell
        self.poll = min(poll, 1.0)  # Flower's own executor looks once a second
        self.rest, self.at_rest = rest, at_rest
        self._busy, self._counting = 0, threading.Lock()
        self._last = math.inf  # who has not worked yet has nothing to rest from

    def serve(self, run: Callable[[str], None]) -> None:
        """Run tasks until the process is terminated. A Flower process that is away is waited for.

        A task that breaks must not take the party down. Flower interrupts the process (SIGINT) when a task's
        run was stopped, in the belief that the process has no other: here it means "next task, please".
        """
        while True:
            try:
                heard = None if self.bell is None else self.bell.heard
                token = self.tasks.acquire()
                if token is not None:
                    run(token)
                elif not self._busy and time.monotonic() - self._last > self.rest:
                    self.at_rest()
                elif self.bell is None or heard is None:
                    time.sleep(self.poll)
                else:
                    self.bell.wait(heard, LONGEST_WAIT)
            except KeyboardInterrupt as error:
                self.say(events.TASK_BROKEN_OFF(error=type(error).__name__))
            except BROKEN_OFF as error:
                self.say(events.TASK_BROKEN_OFF(error=type(error).__name__))

    def in_background(self, run: Callable[[str], None], token: str) -> None:
        """Run a task in a thread of its own.

        Flower leaves a task behind when a run ends while its message is on the way; waiting for the rest of
        such a message must not keep the client from the next one.
        """

        def quietly() -> None:
            try:
                run(token)
            except Exception as error:  # the thread ends here; the reason must not be lost with it
                log.info("%s", error)
                self.say(events.TASK_BROKEN_OFF(error=type(error).__name__))
            finally:
                self._last = time.monotonic()
                with self._counting:
                    self._busy -= 1

        with self._counting:
            self._busy += 1
        threading.Thread(target=quietly, daemon=True).start()

    def client_task(self, app: ClientApp, token: str) -> None:
        """Answer one message with `app`."""
        with self.tasks.message(token) as task:
            failure = ""
            try:
                reply = app(message=task.message, context=task.context)
            except (Exception, SystemExit) as error:
                log.error("the client app failed", exc_info=error)
                self._failed(error)
                failure = what_travels(error)  # the log is this party's own, the reason travels
                task.push_failure(failure)
            else:
                task.push(reply)
            task.finish(failure)

    def _failed(self, error: BaseException) -> None:
        """Say that an app failed; a client that refused has said so itself."""
        if not isinstance(error, Refused):
            self.say(events.TASK_FAILED(error=type(error).__name__))

    def server_task(self, app: ServerApp, token: str) -> None:
        """Run `app` to its end."""
        with self.tasks.run(token) as task:
            failure = ""
            try:
                app(grid=task.grid, context=task.context)
            except Exception as error:
                log.error("the server app failed", exc_info=error)
                self._failed(error)
                failure = what_an_operator_reads(error)
            task.finish(failure)


def what_an_operator_reads(error: Exception) -> str:
    """Return what the SuperLink keeps about a run that failed: our own sentences, not a task.py's.

    >>> what_an_operator_reads(UserError("2 of 5 clients joined"))
    '2 of 5 clients joined'
    >>> what_an_operator_reads(ValueError("patient 4711 has no label"))
    'ValueError: worker.log says more'
    >>> import errno
    >>> what_an_operator_reads(OSError(errno.ENOSPC, "No space left on device"))
    'No space left on device: make room where the server writes, and run it again; it goes on where it was'
    """
    if reason_for(error) is Reason.DISK:
        assert isinstance(error, OSError)
        why = os.strerror(error.errno or 0)
        return f"{why}: make room where the server writes, and run it again; it goes on where it was"
    own = isinstance(error, UserError) and error.__cause__ is None
    return str(error)[:4000] if own else f"{type(error).__name__}: worker.log says more"


def work(
    folder: str,
    client_app: ClientApp = client_app,
    server_app: ServerApp | None = None,
    at_rest: Callable[[], None] | None = None,
) -> None:
    """Work for the party whose folder is given, with the installed apps, until stopped.

    Where there is something to do `at_rest`, it is done when a client has had no task for some time.
    """
    keep_short()
    party = Party.open(Path(folder))
    federation = party.federation
    bound_pulls(federation.timing.round_limit)
    os.environ[PARTY] = str(party.folder)
    say = telling(party)
    say(events.WORKER_STARTED(party=party.name, version=installed("trilemma")))
    if party.client is None:
        if server_app is None:
            from trilemma.flower.server_app import app as server_app
        certificate = party.authority.read_bytes()
        tasks = Tasks("server", federation.superlink, certificate, party.executor_secret)
        worker = Worker(tasks, federation.timing.poll, say=say)
        worker.serve(partial(worker.server_task, server_app))
    else:
        address = f"127.0.0.1:{federation.runtime_port(party.client)}"
        tasks = Tasks("client", address, None, party.executor_secret)
        timing = federation.timing
        # Longer than any pause within a run: an epoch's first half is in memory only.
        pause = max(300.0, 2 * (timing.join_limit + timing.round_limit * (timing.repeats + 1)))
        rest = math.inf if at_rest is None else float(os.environ.get(REST, pause))
        bell = Bell.of_this_party() if BELL in os.environ else None
        worker = Worker(tasks, timing.poll, rest, at_rest or (lambda: None), say, bell)
        worker.serve(partial(worker.in_background, partial(worker.client_task, client_app)))


def start_anew() -> None:
    """Replace this process by the same program: whoever watches it sees the same process go on."""
    log.info("nothing to do: starting anew, without what a round needs")
    os.execv(sys.executable, [sys.executable, "-m", "trilemma.flower.worker", *sys.argv[1:]])


if __name__ == "__main__":
    work(sys.argv[1], at_rest=start_anew)
