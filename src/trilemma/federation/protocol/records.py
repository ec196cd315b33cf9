"""What a run's folder says about its rounds: a line of JSON for each that was committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDS = "rounds.jsonl"


def written_records(run: Path) -> list[dict[str, Any]]:
    """Return what was written about every committed round of a run in a server's folder.

    A line still being written, or that a disk broke, is left out: no model depends on it.
    """
    path = run / RECORDS
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return [record for record in map(read_record, lines) if record is not None]


def read_record(line: bytes) -> dict[str, Any] | None:
    """Return what a line says about a round; None where it is not as it was written."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("round")) is int else None
