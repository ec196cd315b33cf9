"""`trilemma demo`: the trilemma on one screen, on data that ships with the package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trilemma import config as configuration
from trilemma import simulate
from trilemma.cli.progress import ProgressBar
from trilemma.cli.run import plot_runs
from trilemma.cli.tables import results_table

SETTING = {
    "data": {"name": "phishing"},
    "model": {"name": "logistic"},
    "federation": {"clients": 7, "byzantine": 3},
    "algorithm": {"name": "dsgd", "lr": 1.0, "momentum": 0.99, "batch": 25, "l2": 1e-4},
    "run": {"rounds": 400, "seeds": "1-3"},
}

# label, what differs from SETTING
ROWS = (
    ("nobody lies", ("federation.byzantine=0",)),
    ("trusting", ("aggregation.rule=mean", "attack.name=sf")),
    ("robust", ("aggregation.rule=cwmed", "attack.name=sf")),
    ("trusting", ("aggregation.rule=mean", "attack.name=lf")),
    ("robust", ("aggregation.rule=cwmed", "attack.name=lf")),
)


def demo_command(
    out: Annotated[Path, typer.Option(help="directory of the demo; an earlier demo there is replaced")],
) -> None:
    """Train on phishing with 7 clients of whom 3 lie: trusting, robust, and robust and private."""
    console = Console(stderr=True)
    if out.exists():
        shutil.rmtree(out)
    summaries = []
    for index, (label, changes) in enumerate(ROWS):
        with ProgressBar(console, label) as bar:
            settings = configuration.parse(SETTING, changes)
            summaries.append((label, simulate.run(settings, out / f"{index}", bar)))
    free = summaries[0][1]
    runs = [(f"{label}, {s.rule}, {s.attack}", Path(s.directory)) for label, s in summaries[1:]]
    picture = plot_runs(runs, Path(free.directory), out / "demo.png")
    screen = Console()
    screen.print(results_table(summaries, free, "phishing, logistic regression, 400 rounds, seeds 1–3"))
    screen.print(f"curves: {picture}", soft_wrap=True)
