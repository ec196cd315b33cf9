"""`trilemma demo`: the trilemma on one screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo_command(
    out: Annotated[
        Path | None,
        typer.Option(help="directory of the demo; an earlier demo there is replaced; default: runs/demo"),
    ] = None,
) -> None:
    """See three liars among seven clients break the mean, not CAF.

    Trains on the phishing data: trusting, robust, and robust and private.
    """
    from rich.console import Console

    from trilemma.papers import demo
    from trilemma.report.progress import ProgressBar

    console, screen = Console(stderr=True), Console()
    table, picture = demo.demonstrate(out or demo.default_folder(), lambda label: ProgressBar(console, label))
    screen.print(table)
    screen.print(f"curves: {picture}", soft_wrap=True)
