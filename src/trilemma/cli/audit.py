"""`trilemma audit`: what an adversary can find out, beside what is certified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer
from rich.console import Console

from trilemma.base.errors import UserError, nearest
from trilemma.cli.options import PluginOption

if TYPE_CHECKING:
    from trilemma.audit import Audit


def audit_command(
    target: Annotated[
        str | None, typer.Argument(help="a TOML file or a ready configuration, or a federation's folder")
    ] = None,
    task: Annotated[Path | None, typer.Option(help="a task.py with your own model and data")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value, repeatable")
    ] = None,
    trials: Annotated[int, typer.Option(help="runs with each of two data sets")] = 10_000,
    canaries: Annotated[int, typer.Option(help="canaries in the one-run test")] = 1000,
    confidence: Annotated[float, typer.Option(help="of all bounds on ε together")] = 0.99,
    seed: Annotated[int, typer.Option(help="of everything that is drawn")] = 1,
    rounds: Annotated[int | None, typer.Option(help="rounds to play; default: as configured")] = None,
    arithmetic: Annotated[
        str, typer.Option(help="grid: as in any real federation; float: as a simulation's floats")
    ] = "grid",
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Attack a certified ε, and show the ε an adversary finds.

    Takes a configuration, a task or the copy of a federation's folder.

    Exit code 1 if the attack exceeds the certified ε, 2 for bad input.
    """
    from trilemma import experiment as configuration
    from trilemma.audit import Effort, examine, examine_federation
    from trilemma.privacy.types import Arithmetic
    from trilemma.task import Task

    if arithmetic not in get_args(Arithmetic):
        raise UserError(f"unknown arithmetic {arithmetic!r}: {nearest(arithmetic, get_args(Arithmetic))}")
    effort = Effort(trials, canaries, confidence, seed, rounds)
    if target is not None and Path(target).is_dir():
        if task is not None or assignments or plugin or arithmetic != "grid":
            raise UserError(
                "a federation is audited as it is: leave out --task, --set, --plugin, --arithmetic"
            )
        if (Path(target) / "summary.json").is_file():
            raise UserError(
                f"{target} is the folder of a run, not of a federation: audit its configuration, "
                f"`trilemma audit {Path(target) / 'config.toml'}`"
            )
        _show(examine_federation(Path(target), effort), as_json)
        return
    own = None if task is None else Task.from_file(task)
    known = None if own is None else configuration.Own(own.clients_known)
    settings = configuration.load(target, assignments or (), known, plugin or ())
    _show(examine(settings, own, effort, cast(Arithmetic, arithmetic)), as_json)


def _show(done: Audit, as_json: bool) -> None:
    """Print an audit, and exit with 1 if something exceeds its certificate."""
    from trilemma.audit import audit_table

    if as_json:
        print(json.dumps(done.plain()))
    else:
        screen = Console()
        screen.print(audit_table(done))
        for note in done.notes:
            screen.print(f"note: {note}", highlight=False, markup=False)
    if not done.passed:
        raise typer.Exit(1)
