"""`trilemma sweep`: run every combination that `[sweep]` says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilemma.cli.options import PluginOption


def sweep_command(
    file: Annotated[
        str, typer.Argument(help="a TOML file with a table `sweep`, or a name (trilemma list configs)")
    ],
    jobs: Annotated[
        int | None, typer.Option(help="cells at a time; default: one per core, on a GPU one", min=1)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE, repeatable: cells with this value; of one key, any")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="directory of the sweep; default: runs/sweep-FILE")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value in every cell, repeatable")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="of every cell, as in 1-5 or 1,3,7")] = None,
    task: Annotated[Path | None, typer.Option(help="a task.py with your own model and data")] = None,
    plugin: PluginOption = None,
) -> None:
    """Run a grid of configurations; a stopped sweep continues.

    The table `sweep` of FILE lists the values to try. Finished cells are skipped.

    Exit code 1 if some cells have no result; the reasons are printed.
    """
    from rich.console import Console

    from trilemma import experiment as config
    from trilemma import simulate
    from trilemma.report.progress import GridProgress
    from trilemma.task import Task, task_digest

    console = Console(stderr=True)
    extra = [*(set_ or []), *([f"run.seeds='{seeds}'"] if seeds is not None else [])]
    own = None if task is None else config.Own(Task.from_file(task).clients_known)
    edition = "" if task is None else task_digest(task)
    grid = config.load_sweep(file, extra, own, plugin or [], edition).only(only or [])
    for note in grid.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    folder = out or Path("runs") / f"sweep-{Path(file).stem}"
    try:
        with GridProgress(console) as watcher:
            outcome = simulate.run_cells(grid.cells, folder, jobs=jobs, task=task, watcher=watcher)
    except KeyboardInterrupt:
        console.print("stopped; the same command continues", highlight=False)
        raise
    labels = {cell.name: cell.label for cell in grid.cells}
    told = [(labels[name], failure.reason) for name, failure in outcome.failed.items()]
    told += [(config.described(values), reason) for values, reason in grid.refused]
    for label, reason in told:
        console.print(f"no result: {label}: {reason}", highlight=False, markup=False, soft_wrap=True)
    done = f"{len(outcome.ran)} run, {len(outcome.before)} finished before, {len(told)} without a result"
    print(f"{folder}: {len(grid.cells) + len(grid.refused)} cells: {done}")
    if told:
        raise typer.Exit(1)
