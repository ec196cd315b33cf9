"""`trilemma demo`: the trilemma on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilemma.cli.output import note


def demo_command(
    out: Annotated[
        Path | None,
        typer.Option(help="directory of the demo; an earlier demo there is replaced; default: runs/demo"),
    ] = None,
) -> None:
    """Show three liars among seven clients break the mean but not CAF.

    Trains on the phishing data: trusting, robust, and robust and private.
    """
    note("demo: six federations of seven clients, 100 rounds each, three seeds: twenty seconds")
    from rich.console import Console

    from trilemma import demo
    from trilemma.report.progress import ProgressBar

    console, screen = Console(stderr=True), Console()
    folder = out or demo.default_folder()
    note(f"the picture will be {folder / demo.PICTURE}")
    table, picture = demo.demonstrate(folder, lambda label: ProgressBar(console, label))
    screen.print(table)
    screen.print(f"curves: {picture}", soft_wrap=True)
