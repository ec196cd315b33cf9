"""A grid of runs as a table: each cell a configuration, resumable, with the published figure beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from trilemma import simulate
from trilemma.config import Config
from trilemma.records import Summary
from trilemma.report import Table, percent
from trilemma.simulate import Observer


@dataclass(frozen=True)
class Cell:
    """One run of a grid, where it stands in the table, and what the paper reports there, if anything."""

    table: str
    row: str
    column: str
    config: Config
    published: str = ""

    @property
    def folder(self) -> Path:
        """The directory of the run below the grid's."""
        return Path(*(_slug(part) for part in (self.table, self.row, self.column)))


Watch = Callable[[str], AbstractContextManager[Observer]]
"""Opens a progress display for a label."""


def run_grid(cells: Iterable[Cell], out: Path, watch: Watch) -> dict[Cell, Summary]:
    """Run every cell in its directory below `out`, or continue where it was stopped."""
    results = {}
    for cell in cells:
        with watch(f"{cell.table}, {cell.row}, {cell.column}") as observer:
            results[cell] = simulate.run_or_resume(cell.config, out / cell.folder, observer)
    return results


def markdown(cells: Sequence[Cell], results: dict[Cell, Summary]) -> str:
    """Lay the results out as Markdown, one table per `Cell.table`, accuracies as per cent ± std."""
    tables = dict.fromkeys(cell.table for cell in cells)
    return "\n\n".join(
        _table(title, [cell for cell in cells if cell.table == title], results).markdown() for title in tables
    )


def _table(title: str, cells: Sequence[Cell], results: dict[Cell, Summary]) -> Table:
    columns = tuple(dict.fromkeys(cell.column for cell in cells))
    found = {(cell.row, cell.column): cell for cell in cells}
    rows = tuple(
        (row, *(_text(found.get((row, column)), results) for column in columns))
        for row in dict.fromkeys(cell.row for cell in cells)
    )
    return Table(title, ("", *columns), rows, words=1 + len(columns))


def _text(cell: Cell | None, results: dict[Cell, Summary]) -> str:
    if cell is None or cell not in results:
        return ""
    published = f" (paper: {cell.published})" if cell.published else ""
    return percent(results[cell].accuracy) + published


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-._+" else "-" for c in text).strip("-")
