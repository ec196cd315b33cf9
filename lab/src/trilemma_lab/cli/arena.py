"""`trilemma arena`: rules against liars who know them, the worst case of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilemma.cli.output import doing

if TYPE_CHECKING:
    from trilemma_lab.arena.arena import Bout


def arena_command(
    quick: Annotated[bool, typer.Option(help="phishing alone, one seed: minutes on a CPU")] = False,
    ground: Annotated[list[str] | None, typer.Option(help="what is trained, repeatable")] = None,
    threat: Annotated[list[str] | None, typer.Option(help="who is trusted, repeatable")] = None,
    liars: Annotated[list[int] | None, typer.Option(help="how many lie, repeatable")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="repeatable; default: all of the arena")] = None,
    adversary: Annotated[list[str] | None, typer.Option(help="repeatable; default: all of them")] = None,
    seeds: Annotated[str | None, typer.Option(help="as in 1-3; default: 1-3, with --quick 1")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="table.key=value in every cell, repeatable; with --results run.device only"
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="cells at a time", min=1)] = None,
    out: Annotated[Path, typer.Option(help="where cells are kept; the same folder continues")] = Path(
        "runs/arena"
    ),
    results: Annotated[Path | None, typer.Option(help="put what was measured into this file too")] = None,
    details: Annotated[bool, typer.Option(help="what every adversary left, beside the worst case")] = False,
    missing: Annotated[
        bool,
        typer.Option(
            "--missing", help="run what the file in --results lacks; with --show only say what that is"
        ),
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="with --missing: stop then; what is finished counts", min=0)
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option(help="run nothing: the table of such a file; --results takes its rows over"),
    ] = None,
) -> None:
    """Set every rule against liars who know it: the worst case.

    Finished cells are skipped: the same command continues.
    """
    if show is None:
        doing(f"arena: choosing what to run; cells are kept in {out}, and the same command continues")
    from trilemma.base.errors import UserError

    if show is not None:
        some = {"--ground": ground, "--threat": threat, "--liars": liars, "--rule": rule, "--set": set_}
        other = {"--adversary": adversary, "--seeds": seeds, "--quick": quick, "--jobs": jobs}
        if given := [name for name, value in {**some, **other, "--minutes": minutes}.items() if value]:
            raise UserError(f"--show runs nothing and prints all of a file: leave {', '.join(given)} out")
        _show(show, results, details, missing)
        return
    _check_names(ground, threat, adversary, rule)
    changes = set_ or []
    if results is not None:
        _check_kept(results, changes)
    asked = {"ground": ground, "threat": threat, "liars": liars, "rule": rule}
    if missing:
        if results is None:
            raise UserError(
                "--missing needs a file of rows: --results to run what it lacks, --show to see it"
            )
        if quick or seeds is not None:
            raise UserError(
                "--missing runs seeds 1 to 3 of what the file lacks: leave --quick and --seeds out"
            )
        said = {"adversaries": adversary or (), "changes": changes, "jobs": jobs, "minutes": minutes}
        _close(results, out, {name: some for name, some in asked.items() if some}, said)
        return
    if minutes is not None:
        raise UserError("--minutes goes with --missing")
    wanted = _bouts(asked, adversary or (), changes, seeds, quick)
    table = "adversaries" if details else "worst"
    _run(
        wanted, out, jobs, results, table, f"\nchanged in every cell: {', '.join(changes)}" if changes else ""
    )


def _check_names(
    grounds: list[str] | None,
    threats: list[str] | None,
    adversaries: list[str] | None,
    rules: list[str] | None,
) -> None:
    """Refuse names that the arena does not know, once, before anything is run."""
    from trilemma import aggregation
    from trilemma_lab.arena import arena

    _known("nothing is trained", grounds, arena.GROUNDS)
    _known("there is no threat model", threats, arena.THREATS)
    _known("there is no adversary", adversaries, arena.EVERY_ADVERSARY)
    for rule in rules or ():
        if rule not in arena.RULES:
            aggregation.parse(rule, f=0)


def _check_kept(results: Path, changes: Sequence[str]) -> None:
    """Refuse to put rows into a file that cannot be read, or rows of runs that were changed.

    Said before anything is run: rows are put there hours later. A row says on which device it ran, and has
    no place for any other change.
    """
    from trilemma.base import files
    from trilemma.base.errors import UserError
    from trilemma.experiment import load
    from trilemma_lab.arena import arena

    if others := [one for one in changes if one.partition("=")[0].strip() != "run.device"]:
        raise UserError(
            f"--results keeps rows of the arena as it is, and they could not say that {', '.join(others)} "
            "was changed: leave --set out, or --results (the table is printed, the runs stay under --out)"
        )
    load(next(iter(arena.GROUNDS.values())).ready, changes)  # a device that there is not
    files.lock_of(results)
    if results.exists():
        arena.read(results)


def _bouts(
    asked: Mapping[str, Sequence[Any] | None],
    adversaries: Sequence[str],
    changes: Sequence[str],
    seeds: str | None,
    quick: bool,
) -> list[Bout]:
    """Return the cells that are asked for; refuse what asks for none, with the reason."""
    from trilemma.base.errors import UserError
    from trilemma_lab.arena import arena

    reasons: list[str] = []
    grounds = asked["ground"] or (arena.QUICK if quick else tuple(arena.GROUNDS))
    wanted = list(
        arena.bouts(
            grounds,
            asked["rule"] or tuple(arena.RULES),
            seeds or ("1" if quick else "1-3"),
            changes,
            asked["threat"] or (arena.QUICK_THREATS if quick else tuple(arena.THREATS)),
            adversaries,
            asked["liars"] or (),
            reasons.append,
        )
    )
    if not wanted:
        raise UserError(f"nothing is left to run; {reasons[0] if reasons else _offered(grounds)}")
    return wanted


def _offered(grounds: Collection[str]) -> str:
    """Say how many lie where, and which adversaries a ground meets."""
    from trilemma_lab.arena.arena import GROUNDS

    met = "; ".join(f"{name} meets {', '.join(GROUNDS[name].adversaries)}" for name in grounds)
    return f"{_liars(grounds)}; {met if len(grounds) == 1 else 'name one --ground to see whom it meets'}"


def _run(
    wanted: Sequence[Bout], out: Path, jobs: int | None, results: Path | None, table: str, below: str
) -> None:
    """Run cells that are not finished, keep what all of them measured, print its table and a line below."""
    from rich.console import Console

    from trilemma import simulate
    from trilemma.report.progress import GridProgress
    from trilemma_lab.arena import arena, standings

    doing(f"arena: {len(wanted)} cells")
    with GridProgress(Console(stderr=True)) as watcher:
        outcome = simulate.run_cells([bout.cell for bout in wanted], out, jobs=jobs, watcher=watcher)
    found = arena.rows(wanted, out)
    if results is not None:
        arena.record(results, found)
    print(standings.markdown(found, table))
    if below:
        print(below)
    _failed({name: failure.reason for name, failure in outcome.failed.items()})


def _show(show: Path, results: Path | None, details: bool, missing: bool) -> None:
    """Print the tables of a file, and put its rows into another."""
    from trilemma_lab.arena import arena, standings
    from trilemma_lab.arena import missing as lacking

    shown = arena.read(show)
    if results is not None:
        arena.record(results, shown)
    if missing:
        print(f"{lacking.tally(shown).markdown()}\n\n{lacking.table(shown).markdown()}")
    else:
        print(standings.markdown(shown, "adversaries" if details else "worst"))


def _close(
    results: Path, out: Path, asked: Mapping[str, Collection[object]], said: Mapping[str, Any]
) -> None:
    """Run what a file of rows lacks, of what is asked for, and say what is left."""
    from rich.console import Console

    from trilemma.base.errors import UserError
    from trilemma.report.progress import GridProgress
    from trilemma_lab.arena import arena, closing, missing

    def wanted(one: missing.CellStanding) -> bool:
        return all(getattr(one, name) in some for name, some in asked.items())

    if not any(map(wanted, missing.standings(()))):
        rules = ", ".join(dict.fromkeys(one.rule for one in missing.standings(())))
        raise UserError(f"the arena has no such cell; rules: {rules}; {_liars(arena.GROUNDS)}")
    console = Console(stderr=True)
    try:
        done = closing.close(results, out, lambda: GridProgress(console), wanted=wanted, **said)
    except KeyboardInterrupt:
        console.print("stopped; what is finished counts, the same command continues", highlight=False)
        raise
    print(f"{len(done.rows)} rows{'' if done.ended else '; the time is over, the same command continues'}")
    print(missing.tally(arena.read(results) if results.exists() else []).markdown())
    for reason in done.refused:
        print(f"not defined: {reason}")
    _failed({name: failure.reason for name, failure in done.failed.items()})


def _failed(reasons: Mapping[str, str]) -> None:
    """Say which cells have no result and why; end with 1 if there are any."""
    for name, reason in reasons.items():
        print(f"no result: {name}: {reason}")
    if reasons:
        raise typer.Exit(1)


def _liars(grounds: Collection[str]) -> str:
    """Say how many may lie where."""
    from trilemma_lab.arena.arena import GROUNDS

    places: dict[str, list[str]] = {}
    for name in grounds:
        places.setdefault(" or ".join(map(str, GROUNDS[name].liars)), []).append(name)
    return "; ".join(f"on {', '.join(names)} {counts} lie" for counts, names in places.items())


def _known(problem: str, given: list[str] | None, names: Collection[str]) -> None:
    from trilemma.base.errors import UserError, nearest

    for name in given or []:
        if name not in names:
            raise UserError(f"{problem} under the name {name!r}: {nearest(name, names)}")
