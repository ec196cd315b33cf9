"""The server of a federation, put together: its folder, a run's name, and a transport are all it takes."""

from __future__ import annotations

from trilemma.federation.party.layout import Party
from trilemma.federation.party.task import load_task
from trilemma.federation.protocol.events import Say, silent
from trilemma.federation.protocol.transport import Transport
from trilemma.federation.server.commits import CommitLog
from trilemma.federation.server.coordinator import Coordinator
from trilemma.federation.server.exchange import Clock, Correspondence


def open_run(
    server: Party, run: str, transport: Transport, say: Say = silent, clock: Clock | None = None
) -> Coordinator:
    """Return the coordinator of the run `run`, a new one or one that stands somewhere; `go` runs it."""
    clock = clock or Clock()
    return Coordinator(
        run=run,
        party=server,
        agreed=server.agreed,
        task=load_task(server),
        exchange=Correspondence(transport, server.federation.timing.poll, clock),
        log=CommitLog(server.run_folder(run)),
        say=say,
        clock=clock,
    )
