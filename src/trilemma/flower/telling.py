"""Who hears what happens in a worker: its console in words, its log as JSON, metrics that count it."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trilemma.federation.event_log import EventLog, events_file
from trilemma.federation.events import Event, Say, silent, to_all
from trilemma.federation.layout import METRICS, Party

if TYPE_CHECKING:
    from trilemma.flower.metrics import Metrics

log = logging.getLogger("flwr")  # Flower's own: a party's log is one story
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def telling(party: Party, run: str | None = None) -> Say:
    """Return who is told what the worker of `party` does; what the server says is about the run `run`."""
    name = party.name if run is None else run

    def console(event: Event) -> None:
        log.log(LEVELS[event.kind.level], "[%s] %s", name, event.text)

    written = EventLog(events_file(party.running, "worker"), party.name, "worker", run)
    metrics = _metrics(party.folder)
    return to_all(console, written, silent if metrics is None else metrics.of(run or ""))


@lru_cache(maxsize=1)
def _metrics(folder: Path) -> Metrics | None:
    """Serve the metrics of this process, once, where they are asked for."""
    port = os.environ.get(METRICS)
    if not port:
        return None
    from trilemma.flower import metrics

    return metrics.serve(Party.open(folder), port)
