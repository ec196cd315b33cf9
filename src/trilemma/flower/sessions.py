"""A client's session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trilemma.flower import wire
from trilemma.flower.layout import Party
from trilemma.flower.task import Task
from trilemma.privacy.types import NoiseSource


class Session:
    """Tmp."""

    def __init__(self, party: Party, run: str, folder: Path) -> None:
        self.party, self.run, self.folder = party, run, folder

    def open(self, epoch: int, needs_key: bool) -> str:
        """Tmp."""
        return ""

    def agree(self, epoch: int, keys: Mapping[int, str]) -> None:
        """Tmp."""

    def require(self, epoch: int) -> None:
        """Tmp."""

    def pay(self, ask: wire.Ask, task: Task) -> None:
        """Tmp."""

    def noise(self, shares: bool) -> NoiseSource:
        """Tmp."""
        return None

    def note(self, round_: int, facts: Mapping[str, Any]) -> None:
        """Write down what this client saw of a round, for itself."""
        with (self.folder / "notes.jsonl").open("a") as file:
            file.write(json.dumps({"round": round_, **facts}) + "\n")
