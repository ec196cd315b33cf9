"""`trilemma arena`: rules against liars who know them, the worst case of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def arena_command(
    quick: Annotated[bool, typer.Option(help="phishing alone, one seed: minutes on a CPU")] = False,
    ground: Annotated[list[str] | None, typer.Option(help="what is trained, repeatable")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="repeatable; default: all of the arena")] = None,
    seeds: Annotated[str | None, typer.Option(help="as in 1-3; default: 1-3, with --quick 1")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value in every cell, repeatable")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="cells at a time", min=1)] = None,
    out: Annotated[Path, typer.Option(help="where cells are kept; the same folder continues")] = Path(
        "runs/arena"
    ),
) -> None:
    """Set every rule against liars who know it; the worst case of each, finished cells are skipped."""
    from rich.console import Console

    from trilemma import simulate
    from trilemma.errors import UserError, nearest
    from trilemma.papers import arena
    from trilemma.report.progress import GridProgress

    for name in ground or []:
        if name not in arena.GROUNDS:
            raise UserError(f"nothing is trained under the name {name!r}: {nearest(name, arena.GROUNDS)}")
    grounds = ground or (arena.QUICK if quick else tuple(arena.GROUNDS))
    wanted = list(arena.bouts(grounds, rule or arena.RULES, seeds or ("1" if quick else "1-3"), set_ or ()))
    with GridProgress(Console(stderr=True)) as watcher:
        outcome = simulate.run_cells([bout.cell for bout in wanted], out, jobs=jobs, watcher=watcher)
    print(arena.standings(wanted, out).markdown())
    for name, failure in outcome.failed.items():
        print(f"no result: {name}: {failure.reason}")
    if outcome.failed:
        raise typer.Exit(1)
