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
from trilemma.errors import UserError

SETTING = {
    "data": {"name": "phishing"},
    "model": {"name": "logistic"},
    "federation": {"clients": 7, "byzantine": 3},
    "algorithm": {"name": "dsgd", "lr": 1.0, "momentum": 0.99, "batch_size": 25, "weight_decay": 1e-4},
    "run": {"rounds": 400, "seeds": "1-3"},
}

PRIVATE = (
    "algorithm={name='safe-dshb', lr=1.0, momentum=0.99, batch_size=25, weight_decay=1e-4}",
    "privacy={threat='ldp', clip=1.0, noise_multiplier=1.0, delta=1e-4}",
)

ROWS = (
    ("nobody lies", ("federation.byzantine=0",)),
    ("trusting", ("aggregation.rule=mean", "attack={name='ipm', strength=10.0}")),
    ("robust", ("aggregation.rule=caf", "attack={name='ipm', strength=10.0}")),
    ("trusting", ("aggregation.rule=mean", "attack={name='sf'}")),
    ("robust", ("aggregation.rule=caf", "attack={name='sf'}")),
    ("trusting", ("aggregation.rule=mean", "attack={name='lf'}")),
    ("robust", ("aggregation.rule=caf", "attack={name='lf'}")),
    ("robust, private", ("aggregation.rule=caf", "attack={name='lf'}", *PRIVATE)),
)
"""What is run, and what differs from `SETTING`."""


def demo_command(
    out: Annotated[Path, typer.Option(help="directory of the demo; an earlier demo there is replaced")],
) -> None:
    """Train on phishing with 7 clients of whom 3 lie: trusting, robust, and robust and private."""
    _clear(out)
    console = Console(stderr=True)
    summaries = []
    for index, (label, changes) in enumerate(ROWS):
        settings = configuration.parse(SETTING, changes)
        with ProgressBar(console, f"{label} ({settings.attack.name})") as bar:
            summaries.append((label, simulate.run(settings, out / str(index), bar)))
    free = summaries[0][1]
    runs = [(f"{label}: {s.rule} under {s.attack}", Path(s.directory)) for label, s in summaries[1:]]
    picture = plot_runs(runs, Path(free.directory), out / "demo.png")
    screen = Console()
    screen.print(results_table(summaries, free, "phishing, logistic regression, 400 rounds, seeds 1–3"))
    screen.print(f"curves: {picture}", soft_wrap=True)


def _clear(out: Path) -> None:
    """Remove an earlier demo, and nothing that is not one."""
    if not out.exists():
        return
    if any(out.iterdir()) and not (out / "0" / "config.toml").exists():
        raise UserError(f"{str(out)!r} holds something that is not a demo; name another --out")
    shutil.rmtree(out)
