"""Who hears what happens in a party's process: its log in words, its events as JSON, metrics."""

from __future__ import annotations

import logging
import logging.handlers
import os
from functools import lru_cache
from typing import TYPE_CHECKING

from trilemma.federation.party.layout import METRICS, Party
from trilemma.federation.processes.event_log import EventLog, events_file
from trilemma.federation.protocol.events import Event, Say, silent, to_all

if TYPE_CHECKING:
    from trilemma.federation.processes.metrics import Metrics
    from trilemma.federation.processes.traces import Traces

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

LARGEST = 8 << 20
"""Bytes after which a log is put aside, as NAME.log.1, and a new one begun: others can make it long."""

log = logging.getLogger("trilemma")


def keep_log(party: Party) -> None:
    """Let this process's log go to its party's file, which never grows without bound."""
    handler = logging.handlers.RotatingFileHandler(party.process_log, maxBytes=LARGEST, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def telling(party: Party, run: str | None = None) -> Say:
    """Return who is told what the process of `party` does; what the server says is about the run `run`."""
    name = party.name if run is None else run

    def console(event: Event) -> None:
        log.log(LEVELS[event.kind.level], "[%s] %s", name, event.text)

    written, metrics = EventLog(events_file(party.running), party.name, run), _metrics(party)
    traces = _traces(party)
    counted = silent if metrics is None else metrics.of(run or "")
    return to_all(console, written, counted, silent if traces is None else traces.of(run or ""))


@lru_cache(maxsize=1)
def _traces(party: Party) -> Traces | None:
    """Make traces of this process's rounds, where they are asked for."""
    if os.environ.get("TRILEMMA_TRACES") != "1":
        return None
    from trilemma.federation.processes import traces

    return traces.Traces(party.name)


@lru_cache(maxsize=1)
def _metrics(party: Party) -> Metrics | None:
    """Serve the metrics of this process, once, where they are asked for."""
    port = os.environ.get(METRICS)
    if not port:
        return None
    from trilemma.federation.processes import metrics

    return metrics.serve(party, port)
