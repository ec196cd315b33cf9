"""Who hears what happens in a party's process: its log in words, its events as JSON, metrics."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilemma.federation.party.layout import METRICS, Party
from trilemma.federation.protocol.events import CATALOGUE, Event, Say, silent, to_all

if TYPE_CHECKING:
    from trilemma.federation.processes.metrics import Metrics
    from trilemma.federation.processes.traces import Traces

LARGEST_LOG = 4 << 20
"""Bytes after which a log is put aside and a new one begun; the one before that is forgotten."""


def events_file(running: Path) -> Path:
    """Return where a party's process writes down what happens, in its folder `Party.running`."""
    return running / "events.jsonl"


@dataclass(frozen=True)
class EventLog:
    """Writes events as lines of JSON, each with time, level, party and text.

    A log that cannot be written, on a disk that is full, stops nobody's work.

    >>> import tempfile
    >>> from trilemma.federation.protocol.events import ROUND_REPEATED
    >>> path = Path(tempfile.mkdtemp()) / "run" / "events.jsonl"
    >>> EventLog(path, "server")(ROUND_REPEATED(round=3))
    >>> [(line["event"], line["party"], line["round"]) for line in read_events(path)]
    [('round-repeated', 'server', 3)]
    """

    path: Path
    party: str
    run: str | None = None

    def __call__(self, event: Event) -> None:
        """Write an event down."""
        about = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": event.kind.level}
        about |= {"event": event.code, "party": self.party}
        if self.run is not None:
            about["run"] = self.run
        line = json.dumps({**about, **event.facts, "text": event.text}, ensure_ascii=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size > LARGEST_LOG:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            return


def read_events(path: Path, most: int = LARGEST_LOG) -> list[dict[str, Any]]:
    """Return the events in the last `most` bytes of a log, the newest last; a broken line is left out."""
    content = b""
    for one in (path, path.with_name(path.name + ".1")):
        content = _tail(one, most - len(content)) + content
    found = []
    for line in content.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and str(event.get("event")) in CATALOGUE:
            found.append(event)
    return found


def _tail(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read(most) if most > 0 else b""
    except OSError:
        return b""


# --- all of them together ---

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


def listener(party: Party, run: str | None = None) -> Say:
    """Return who hears what the process of `party` does; what the server says is about the run `run`."""
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
