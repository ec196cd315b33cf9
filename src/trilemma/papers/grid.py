"""A grid of runs as tables: where each run stands, and what it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from trilemma.config import Cell, Config
from trilemma.simulate import Observer

Watch = Callable[[str], AbstractContextManager[Observer]]
"""Opens a progress display for a label."""


@dataclass(frozen=True)
class Place:
    """One run of a study and where it stands: in which table, row and column.

    A run may stand in several places, and several runs in one: a grid of hyper-parameters.
    """

    table: str
    row: str
    column: str
    config: Config

    @property
    def at(self) -> tuple[str, str, str]:
        """Where it stands."""
        return (self.table, self.row, self.column)

    @property
    def cell(self) -> Cell:
        """The run, as a sweep knows it."""
        return Cell({"table": self.table, "row": self.row, "column": self.column}, self.config)

    def with_(self, *changes: str) -> Place:
        """Return the same place with a changed run."""
        return replace(self, config=self.config.with_(*changes)) if changes else self
