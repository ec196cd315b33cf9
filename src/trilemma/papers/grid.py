"""A grid of runs as a table: each cell a configuration, resumable, with the published figure beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from trilemma import simulate
from trilemma.config import Config
from trilemma.simulate import Observer, Spread, Summary


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
    pages = []
    for table in dict.fromkeys(cell.table for cell in cells):
        own = [cell for cell in cells if cell.table == table]
        columns = list(dict.fromkeys(cell.column for cell in own))
        lines = [
            f"**{table}**",
            "",
            "| | " + " | ".join(columns) + " |",
            "|---|" + "---|" * len(columns),
        ]
        for row in dict.fromkeys(cell.row for cell in own):
            found = {cell.column: cell for cell in own if cell.row == row}
            texts = [_text(found.get(column), results) for column in columns]
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
        pages.append("\n".join(lines))
    return "\n\n".join(pages)


def _text(cell: Cell | None, results: dict[Cell, Summary]) -> str:
    if cell is None or cell not in results:
        return ""
    published = f" (paper: {cell.published})" if cell.published else ""
    return accuracy_text(results[cell].accuracy) + published


def accuracy_text(spread: Spread) -> str:
    """Write an accuracy for a table.

    >>> accuracy_text(Spread.of({1: 0.8, 2: 0.82}))
    '81.0 ± 1.4'
    """
    if spread.mean is None:
        return "*"
    return f"{100 * spread.mean:.1f} ± {100 * (spread.std or 0.0):.1f}"


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-._+" else "-" for c in text).strip("-")
