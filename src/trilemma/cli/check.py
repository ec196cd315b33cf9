"""`trilemma check`: look at a task before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilemma.base.errors import UserError
from trilemma.cli.options import PluginOption
from trilemma.cli.output import doing


def check_command(
    task: Annotated[Path, typer.Argument(help="a task.py with your own model and data")],
    clients: Annotated[int | None, typer.Option(help="number of clients; default: the task's")] = None,
    config: Annotated[
        str | None, typer.Option(help="also look at a run of this TOML file: batches, clipping, ε")
    ] = None,
    neighbours: Annotated[
        bool,
        typer.Option("--neighbours", help="also change single records, and count the examples that change"),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    plugin: PluginOption = None,
) -> None:
    """Check a task.py: your own data, model, loss and gradients.

    Exit code 2, with the cure, if something is wrong.
    """
    doing(f"{task}: reading all clients' data, trying model and loss, comparing gradients with autograd's")
    from rich.console import Console

    from trilemma.base import plugins
    from trilemma.simulate.experiment import choose_device
    from trilemma.simulate.rehearsal import look
    from trilemma.task import Task

    plugins.load(plugin or ())
    found = look(Task.from_file(task, clients), config, choose_device(device).type, neighbours)
    screen = Console()
    for heading, lines in found.facts.items():
        screen.print(f"[bold]{heading}[/]", highlight=False)
        for line in lines:
            screen.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    for warning in found.warnings:
        screen.print(f"warning: {warning}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    if found.problems:
        raise UserError("\n".join(found.problems))
    said = f"{task} can be trained; see the warnings" if found.warnings else f"nothing is wrong with {task}"
    screen.print(said, highlight=False, markup=False, soft_wrap=True)
