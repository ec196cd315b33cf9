"""`trilemma plot`: pictures of runs as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilemma.cli.output import say


def plot_command(
    runs: Annotated[list[Path], typer.Argument(help="run directories, or a federation's folder")],
    kind: Annotated[str, typer.Option(help="curves, suspects, privacy or cost")] = "curves",
    out: Annotated[Path | None, typer.Option(help="a .png or .svg file; default: KIND.png here")] = None,
) -> None:
    """Draw runs: scores, whom the rule trusted, ε, or seconds.

    Plots them over rounds, as PNG or SVG. Seconds are those of each stage of a round.
    """
    from trilemma.report import load
    from trilemma.report.pictures import draw

    drawn = draw([load(run) for run in runs], kind, out or Path(f"{kind}.png"))
    say(str(drawn))
