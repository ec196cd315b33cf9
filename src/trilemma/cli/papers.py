"""`trilemma papers`: run a paper's experiments and print ours beside the printed numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trilemma.cli.progress import ProgressBar
from trilemma.errors import ConfigError, nearest
from trilemma.papers import byz_clip21, cafcor, safe_dshb
from trilemma.papers.grid import Cell, markdown, run_grid

GRIDS: dict[str, Callable[[str], list[Cell]]] = {
    "safe-dshb": safe_dshb.cells,
    "cafcor-mnist": lambda seeds: cafcor.cells(seeds, "mnist"),
    "cafcor-fashion": lambda seeds: cafcor.cells(seeds, "fashion"),
    "byz-clip21": byz_clip21.cells,
}


def papers_command(
    name: Annotated[str, typer.Argument(help=", ".join(GRIDS))],
    out: Annotated[Path | None, typer.Option(help="directory of the runs; default: runs/papers/NAME")] = None,
    seeds: Annotated[str, typer.Option(help="as in 1-5 or 1,3,7")] = "1-3",
    only: Annotated[str, typer.Option(help="run only cells whose row or column contains this")] = "",
) -> None:
    """Run the experiments of a paper, resumably, and print a Markdown table beside its numbers."""
    if name not in GRIDS:
        raise ConfigError(f"no experiments are called {name!r}: {nearest(name, GRIDS)}")
    cells = [cell for cell in GRIDS[name](seeds) if only in cell.row or only in cell.column]
    console = Console(stderr=True)
    results = run_grid(
        cells, out or Path("runs") / "papers" / name, lambda label: ProgressBar(console, label)
    )
    print(markdown(cells, results))
