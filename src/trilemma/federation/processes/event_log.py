"""Where a party's events are written down: lines of JSON in its own `run/events.jsonl`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilemma.federation.protocol.events import CATALOGUE, Event

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
