"""`trilemma arena`: rules against liars who know them, the worst case of each."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer


def arena_command(
    quick: Annotated[bool, typer.Option(help="phishing alone, one seed: minutes on a CPU")] = False,
    ground: Annotated[list[str] | None, typer.Option(help="what is trained, repeatable")] = None,
    threat: Annotated[list[str] | None, typer.Option(help="who is trusted, repeatable")] = None,
    liars: Annotated[list[int] | None, typer.Option(help="how many lie, repeatable")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="repeatable; default: all of the arena")] = None,
    adversary: Annotated[list[str] | None, typer.Option(help="repeatable; default: all of them")] = None,
    seeds: Annotated[str | None, typer.Option(help="as in 1-3; default: 1-3, with --quick 1")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value in every cell, repeatable")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="cells at a time", min=1)] = None,
    out: Annotated[Path, typer.Option(help="where cells are kept; the same folder continues")] = Path(
        "runs/arena"
    ),
    results: Annotated[Path | None, typer.Option(help="put what was measured into this file too")] = None,
    details: Annotated[bool, typer.Option(help="what every adversary left, beside the worst case")] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="with --show: cells that did not meet the strongest liars")
    ] = False,
    show: Annotated[
        Path | None,
        typer.Option(help="run nothing: the table of such a file; --results takes its rows over"),
    ] = None,
) -> None:
    """Set every rule against liars who know it: the worst case.

    Finished cells are skipped: the same command continues.
    """
    from rich.console import Console

    from trilemma import aggregation, files, simulate
    from trilemma.errors import UserError
    from trilemma.papers import arena, gaps
    from trilemma.report.progress import GridProgress

    if show is not None:
        shown = arena.read(show)
        if results is not None:
            arena.record(results, shown)
        part = "adversaries" if details else "worst"
        print(gaps.missing(shown).markdown() if missing else arena.markdown(shown, part))
        return
    if missing:
        raise UserError("--missing tells what a file lacks: name it with --show")
    _known("nothing is trained", ground, arena.GROUNDS)
    _known("there is no threat model", threat, arena.THREATS)
    _known("there is no adversary", adversary, arena.EVERY_ADVERSARY)
    for one in rule or ():
        if one not in arena.RULES:
            aggregation.parse(one, f=0)  # said once, before anything is run
    if results is not None and files.room_for(results).exists():
        arena.read(results)  # what is measured is to be put into it, hours later
    reasons: list[str] = []
    wanted = list(
        arena.bouts(
            ground or (arena.QUICK if quick else tuple(arena.GROUNDS)),
            rule or tuple(arena.RULES),
            seeds or ("1" if quick else "1-3"),
            set_ or (),
            threat or (arena.QUICK_THREATS if quick else tuple(arena.THREATS)),
            adversary or (),
            liars or (),
            reasons.append,
        )
    )
    if not wanted:
        why = reasons[0] if reasons else f"liars: {_liars(ground or arena.GROUNDS)}"
        raise UserError(f"nothing is left to run; {why}")
    with GridProgress(Console(stderr=True)) as watcher:
        outcome = simulate.run_cells([bout.cell for bout in wanted], out, jobs=jobs, watcher=watcher)
    found = arena.rows(wanted, out)
    if results is not None:
        arena.record(results, found)
    print(arena.markdown(found, "adversaries" if details else "worst"))
    for name, failure in outcome.failed.items():
        print(f"no result: {name}: {failure.reason}")
    if outcome.failed:
        raise typer.Exit(1)


def _liars(grounds: Collection[str]) -> str:
    """Say how many may lie where."""
    from trilemma.papers.arena import GROUNDS

    return "; ".join(f"{name} {', '.join(map(str, GROUNDS[name].liars))}" for name in grounds)


def _known(problem: str, given: list[str] | None, names: Collection[str]) -> None:
    from trilemma.errors import UserError, nearest

    for name in given or []:
        if name not in names:
            raise UserError(f"{problem} under the name {name!r}: {nearest(name, names)}")
