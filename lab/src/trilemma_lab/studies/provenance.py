"""By which code a run of a study was made: written beside it when it ends.

Whoever continues a study, perhaps on another day, reads the runs that are finished without running them. They
are of the code that ran then, and this is how that is known.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trilemma.base import files
from trilemma.base.typed import typed
from trilemma_lab.studies.measured import device_name
from trilemma_lab.studies.sources import code_of, sources_of

FILE = "provenance.json"


@dataclass(frozen=True)
class Provenance:
    """When, where and by which code a run was made."""

    device: str
    date: str
    code: str

    @property
    def words(self) -> str:
        """Say it as a cell does."""
        return f"{self.device}, {self.date}; code {self.code}"


def write_down(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write beside a run that has just ended that today's code on this machine made it."""
    made = Provenance(device_name(), datetime.date.today().isoformat(), _code(settings))
    files.write_atomically(folder / FILE, (json.dumps(asdict(made)) + "\n").encode())


def other_provenance(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return when, where and by which code a run was made; nothing where it was today's on such a device."""
    if not (folder / FILE).is_file():
        return "device unknown, date unknown; code not on record"
    with files.readable(folder / FILE, "what made a run"):
        made = typed(Provenance, json.loads((folder / FILE).read_text("utf-8")))
    here = (device_name(), _code(settings))
    return "" if (made.device, made.code) == here else made.words


def _code(settings: Mapping[str, Any]) -> str:
    return code_of(sources_of([settings]))
