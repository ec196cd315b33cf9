"""The commands: `python -m trilemma.papers.lp_proj run | compare | distance | growth | plot | tune`."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from trilemma import config, simulate
from trilemma.config import Config
from trilemma.errors import UserError
from trilemma.papers.lp_proj.blowup import growth_table
from trilemma.papers.lp_proj.grid import ROUNDS, Point, lookup, points
from trilemma.papers.lp_proj.methods import METHODS
from trilemma.papers.lp_proj.results import (
    compare,
    distances,
    plot_fairness,
    train_losses,
    validation_accuracy,
)


def _tried(job: tuple[Point, dict[str, Any], int, int]) -> tuple[float, dict[str, Any]]:
    point, choice, rounds, seed = job
    torch.set_num_threads(1)
    return validation_accuracy(point.config(rounds, (seed,), choice), seed), choice


def _ran(job: tuple[Point, Config, Path]) -> str:
    point, settings, out = job
    torch.set_num_threads(1)
    summary = simulate.run_or_resume(settings, out / point.folder)
    if not point.percent:
        train_losses(point, out)
    return f"{point.folder}: {summary.accuracy.mean} ± {summary.accuracy.std}, diverged {summary.diverged}"


app = typer.Typer(add_completion=False, help="The experiments of lp-proj.", pretty_exceptions_enable=False)
Out = Annotated[Path, typer.Option(help="directory of the runs")]
Processes = Annotated[int, typer.Option(help="points run at the same time, one thread each")]


@app.command()
def run(
    task: str,
    out: Out,
    table: int = 3,
    rounds: int = ROUNDS,
    seeds: str = "1-5",
    processes: Processes = 1,
    only: Annotated[str, typer.Option(help="methods, separated by semicolons")] = "",
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="change the configuration: run.precision=tf32")
    ] = None,
) -> None:
    """Run the points of a table; points that are finished are not run again."""
    cells = points(task, table)
    rows = {point.method: point for point in cells}
    wanted = [name.strip() for name in only.split(";") if name.strip()] or list(rows)
    for name in wanted:
        lookup(rows, name, f"method of Table {table}")
    chosen = [point for point in cells if point.method in wanted]
    numbers = config.parse_seeds(seeds)  # all settings are read before anything runs
    jobs = [(point, point.config(rounds, numbers).with_(*(changes or [])), out) for point in chosen]
    with ProcessPoolExecutor(processes) as pool:
        for line in pool.map(_ran, jobs):
            typer.echo(line)


@app.command(name="compare")
def compare_command(
    task: str,
    out: Out,
    table: int = 3,
    best: Annotated[bool, typer.Option(help="Tables 5 to 8: each seed's best round, not its last")] = False,
) -> None:
    """Print ours beside the paper's, as Markdown."""
    typer.echo(compare(task, table, out, best))


@app.command(name="distance")
def distance_command(tasks: list[str], out: Out) -> None:
    """Print how far the attacked cells are from the paper's, with last rounds and with best rounds."""
    typer.echo(distances(tasks, out))


@app.command(name="growth")
def growth_command() -> None:
    """Print how fast poisoned and flipped messages blow up lp-proj-2's common vector, over the grid."""
    typer.echo(growth_table())


@app.command()
def plot(task: str, out: Out, picture: Path) -> None:
    """Draw accuracy against fairness for the methods of Table 3 that were run."""
    plot_fairness(task, out, picture)


@app.command()
def tune(task: str, method: str, rounds: int = 60, seed: int = 101, processes: Processes = 1) -> None:
    """Try the paper's grid on one seed; print validation accuracies, best first."""
    point = Point(task, method)
    jobs = [(point, choice, rounds, seed) for choice in lookup(METHODS, method, "method").choices()]
    with ProcessPoolExecutor(processes) as pool:
        tried = sorted(pool.map(_tried, jobs), key=lambda pair: -pair[0])
    for accuracy, choice in tried:
        typer.echo(f"{accuracy:.4f}  {choice}")


def main() -> None:
    """Run a command; a user's mistake becomes its message and exit code 2."""
    try:
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
