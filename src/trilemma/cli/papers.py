"""`trilemma papers`: run a paper's experiments and print ours beside the printed numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilemma import papers


def papers_command(
    name: Annotated[str, typer.Argument(help=", ".join(papers.STUDIES))],
    out: Annotated[Path | None, typer.Option(help="directory of the runs; default: runs/papers/NAME")] = None,
    seeds: Annotated[str, typer.Option(help="as in 1-5 or 1,3,7")] = "1-3",
    only: Annotated[str, typer.Option(help="run only cells whose row or column contains this")] = "",
) -> None:
    """Run the experiments of a paper, resumably, and print a Markdown table beside its numbers."""
    from rich.console import Console

    from trilemma.papers.grid import markdown, run_grid
    from trilemma.report.progress import ProgressBar

    console = Console(stderr=True)
    cells = papers.cells(name, seeds, only)
    folder = out or Path("runs") / "papers" / name
    results = run_grid(cells, folder, lambda label: ProgressBar(console, label))
    print(markdown(cells, results))
