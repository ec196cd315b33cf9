"""A party's program: one process, which is the server or a client and nothing else.

    python -m trilemma.federation.processes.party_process FOLDER

One process at a time works in a folder: it holds a lock as long as it lives, and its state file is there for
as long. Told to stop (SIGTERM) it finishes what it is answering, and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.version import VERSION
from trilemma.federation.party.layout import PROCESS, Party
from trilemma.federation.processes import groups as processes
from trilemma.federation.processes.logs import keep_log, listener, log
from trilemma.federation.protocol import events


def work(folder: Path) -> None:
    """Be the party whose folder is given, until told to stop."""
    party, stop = Party.open(folder), threading.Event()
    party.check()
    party.running.mkdir(exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.suppress(OSError):
        os.setsid()  # who stops a party stops its group
    taken = UserError(f"{party.name}: another process works in {party.folder}")
    with files.locked(party.running / f"{PROCESS}.lock", taken):
        own = processes.seen(PROCESS, os.getpid(), party.running)
        processes.remember(own, party.running)
        try:
            keep_log(party)
            listener(party)(events.PARTY_STARTED(party=party.name, version=VERSION))
            _become(party, stop)
        except Exception as error:
            log.error("%s", error, exc_info=None if isinstance(error, UserError) else error)
            raise
        finally:
            party.ready.unlink(missing_ok=True)
            processes.forget(own, party.running)


def _become(party: Party, stop: threading.Event) -> None:
    """Import what this party is made of, and be it; gRPC's objects belong to the process that makes them."""
    if party.client is None:
        from trilemma.federation.processes.server_process import serve

        serve(party, stop)
    else:
        from trilemma.federation.processes.client_process import serve as answer

        answer(party, stop)


def main() -> None:
    """Work in the folder that is named; say a user's mistake in a sentence."""
    try:
        work(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
