"""Who hears what happens in a worker: its console, in words, and the party's log of events, as JSON."""

from __future__ import annotations

import logging

from trilemma.federation.event_log import EventLog, events_file
from trilemma.federation.events import Event, Say, to_all
from trilemma.federation.layout import Party

log = logging.getLogger("flwr")  # Flower's own: a party's log is one story
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def telling(party: Party, run: str | None = None) -> Say:
    """Return who is told what the worker of `party` does; what the server says is about the run `run`."""
    name = party.name if run is None else run

    def console(event: Event) -> None:
        log.log(LEVELS[event.kind.level], "[%s] %s", name, event.text)

    return to_all(console, EventLog(events_file(party.running, "worker"), party.name, "worker", run))
