"""`trilemma papers`: the papers' experiments, ours beside theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilemma.base.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from trilemma_lab.papers.published import Paper
    from trilemma_lab.studies.grid import Place
    from trilemma_lab.studies.measured import Results
    from trilemma_lab.studies.result_files import ResultFiles
    from trilemma_lab.studies.study import Study

papers_app = typer.Typer(
    help="Run the papers' experiments; compare with their numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(help="a study (trilemma papers list)")]
ResultsFolder = Annotated[Path, typer.Option("--results", help="folder of NAME.json")]
RESULTS = Path("lab/results")
RUNS = Path("runs") / "papers"


@papers_app.command("list")
def list_command(
    results: ResultsFolder = RESULTS,
    tables: Annotated[
        bool, typer.Option("--tables", help="how many places of each table are filled")
    ] = False,
) -> None:
    """Show every study: what it is, its runs, how many places are filled, when and by which code."""
    from rich.console import Console
    from rich.table import Table as ScreenTable
    from rich.text import Text

    from trilemma.report import Table
    from trilemma_lab.papers import studies
    from trilemma_lab.studies.filled import filled
    from trilemma_lab.studies.result_files import ResultFiles

    if results != RESULTS and not results.is_dir():
        raise UserError(f"there is no folder {str(results)!r} of results")
    files = ResultFiles(studies, results)
    there = {name: files.read(name) for name in sorted(studies)}
    if tables:
        rows = [
            (name, table, one.words)
            for name, kept in there.items()
            if studies[name].compute is None
            for table, one in filled(studies[name], kept).items()
        ]
        Console().print(Table("", ("study", "table", "places filled"), tuple(rows), words=3))
        return
    shown = ScreenTable.grid(padding=(0, 2))
    shown.add_column(no_wrap=True, style="bold")  # a name that is cut short cannot be typed
    shown.add_column()
    for name, kept in there.items():
        shown.add_row(name, Text(studies.summary(name)))
        for line in _standing(studies[name], kept):
            shown.add_row("", Text(line, style="dim"))
    Console().print(shown)


def _standing(study: Study, found: Results) -> list[str]:
    """Say how many runs a study has and how much of it is there, when it was run and by which code."""
    from trilemma_lab.studies.filled import altogether, filled

    much = ""
    if study.compute is None:
        runs = f"{len(study.runs())} runs, quick {len(study.runs(quick=True))}"
        much = f"{runs}; filled: {altogether(filled(study, found)).words}"
    age = found.staleness(study.module).brief
    when = f"results of {found.date}" if found.date else "results without a date"
    standing = ", ".join(one for one in (when, age) if one) if found.cells else "no results"
    return [line for line in (much, standing) if line]


@papers_app.command("run")
def run_command(
    names: Annotated[list[str], typer.Argument(help="studies (trilemma papers list), or all")],
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="a look that leaves much out, and says what")
    ] = False,
    seeds: Annotated[str | None, typer.Option(help="as in 1-5 or 1,3,7; default: the study's")] = None,
    only: Annotated[
        str,
        typer.Option(help="runs whose table, row or column contains this; several words: 'Table 3 / R = 5'"),
    ] = "",
    missing: Annotated[
        bool, typer.Option("--missing", help="only what the results lack: empty places, more seeds of others")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="table.key=value in every run, repeatable: run.rounds=20; results say so"),
    ] = None,
    settled: Annotated[
        bool,
        typer.Option(
            "--settled",
            help="search no grid of hyper-parameters: take what is shown, or was best at the nearest place",
        ),
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="runs at a time", min=1)] = None,
    minutes: Annotated[float | None, typer.Option(help="stop then; the same command goes on", min=0)] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="say how long it would take on this machine, and run nothing")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="directory of the runs; default: runs/papers/NAME, of several studies …/together"),
    ] = None,
    results: ResultsFolder = RESULTS,
) -> None:
    """Run studies, resumably, and write what each gave to lab/results/NAME.json (quick: NAME-quick.json).

    A run that stands in several is run once; results are written as runs end.
    """
    from rich.console import Console

    from trilemma.simulate.sweep import check_device
    from trilemma_lab.arena.closing import limited
    from trilemma_lab.papers import studies
    from trilemma_lab.studies import filled
    from trilemma_lab.studies.result_files import ResultFiles

    console = Console(stderr=True)
    chosen = {name: studies[name] for name in ([*studies] if names == ["all"] else names)}
    kept = ResultFiles(chosen, results, quick)
    before = {name: kept.read(name) for name in chosen}  # what cannot be read is named before anything runs
    asked = _places(chosen, seeds, quick, only, set_ or [])
    if settled:
        asked = {name: filled.settled(one, before[name]) for name, one in asked.items()}
    places = asked
    if missing:
        places = {name: filled.missing(one, before[name]) for name, one in asked.items()}
        chosen = {name: one for name, one in chosen.items() if places.get(name, not before[name].cells)}
    if estimate:
        return _estimate(chosen, places, quick, jobs, results)
    if quick:
        _say_what_is_left_out(chosen, jobs, results, console)
    folder = out or RUNS / (names[0] if len(names) == 1 and names != ["all"] else "together")
    check_device([place.cell for own in places.values() for place in own], folder)
    kept.check_room()
    for name, study in chosen.items():
        if study.compute is not None:
            kept.add(name, study.compute(quick))
            print(kept.path(name))
    wanted = {name: one for name, one in places.items() if one}
    for name in [name for name in places if name not in wanted]:
        print(f"{name}: nothing to run")
    run = partial(_run, kept=kept, folder=folder, jobs=jobs, console=console)
    begun = time.monotonic()
    try:
        with limited(minutes):
            if missing:
                _run_until_nothing_is_missing(wanted, asked, kept, run)
            elif wanted:
                run(wanted)
    except KeyboardInterrupt:
        if minutes is None or time.monotonic() - begun < 60 * minutes:
            raise
        print(f"{minutes:g} minutes are over: what has ended is kept, and the same command goes on")


def _run_until_nothing_is_missing(
    wanted: Mapping[str, Sequence[Place]],
    asked: Mapping[str, Sequence[Place]],
    kept: ResultFiles,
    run: Callable[[Mapping[str, Sequence[Place]]], None],
) -> None:
    """Run what results lack, and what they lack then, of what is asked for; nothing is run twice.

    Where the rest of a grid was tried, what was best there has yet to be run with the other seeds.
    """
    from trilemma_lab.studies import filled

    ran: set[str] = set()
    while wanted:
        run(wanted)
        ran |= {one.cell.name for own in wanted.values() for one in own}
        left = {name: filled.missing(asked[name], kept.read(name)) for name in wanted}
        more = {name: [one for one in own if one.cell.name not in ran] for name, own in left.items()}
        wanted = {name: own for name, own in more.items() if own}


def _places(
    chosen: Mapping[str, Study], seeds: str | None, quick: bool, only: str, changes: Sequence[str]
) -> dict[str, Sequence[Place]]:
    """Return the runs that are asked for, by study; refuse what asks for none."""
    from trilemma.base.errors import ConfigError

    if changes and (computed := [name for name, study in chosen.items() if study.compute is not None]):
        raise ConfigError(f"{', '.join(computed)}: computed, without runs that --set could change")
    places: dict[str, Sequence[Place]] = {
        name: [place.with_(*changes) for place in study.runs(seeds, quick, only)]
        for name, study in chosen.items()
        if study.compute is None
    }
    if places and not any(places.values()):
        raise ConfigError(f"{', '.join(places)}: no run whose table, row or column contains {only!r}")
    return places


def _run(
    wanted: Mapping[str, Sequence[Place]],
    kept: ResultFiles,
    folder: Path,
    jobs: int | None,
    console: Console,
) -> None:
    """Run places of studies, keep what they give as they end, and say how many there are."""
    from trilemma.report.progress import GridProgress
    from trilemma_lab.papers import run_studies

    with GridProgress(console) as watcher:
        found, outcome = run_studies(wanted, folder, jobs=jobs, watcher=watcher, keep=kept.add)
    for name, cells in found.items():
        if cells:
            kept.add(name, cells)
        print(f"{kept.path(name)}: {len(cells)} of {len({place.at for place in wanted[name]})} places")
    if outcome.failed:
        raise typer.Exit(1)


def _estimate(
    chosen: Mapping[str, Study],
    places: Mapping[str, Sequence[Place]],
    quick: bool,
    jobs: int | None,
    results: Path,
) -> None:
    """Print how long studies would take; what quick looks would is kept for whoever asks for one."""
    from rich.console import Console

    from trilemma.report import Table
    from trilemma_lab.studies.estimate import estimates, in_figures, keep

    found = {}
    for name, one in estimates(chosen, places, quick):
        found[name] = one
        if quick:
            keep({name: one}, results)
    at_once = jobs or 2
    lines = [
        (name, str(one.runs), in_figures(one.seconds, 3), in_figures(one.minutes(at_once)))
        for name, one in found.items()
    ]
    total = sum(one.minutes(at_once) for one in found.values())
    heads = ("study", "runs", "seconds each", f"minutes, {at_once} at a time")
    Console().print(Table("", heads, tuple(lines), (f"together about {in_figures(total)} minutes",)))


def _say_what_is_left_out(
    chosen: Mapping[str, Study], jobs: int | None, results: Path, console: Console
) -> None:
    """Say what a quick look leaves out, and how long it takes where that was estimated."""
    from trilemma_lab.studies.estimate import in_figures, kept

    estimated, where = kept(results)
    at_once = jobs or 2
    for name, study in chosen.items():
        long = f" (about {in_figures(estimated[name].minutes(at_once))} minutes)" if name in estimated else ""
        said = f"{name}, quick{long}: left out are {study.left_out}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    if len(chosen) > 1 and chosen.keys() <= estimated.keys():
        total = sum(estimated[name].minutes(at_once) for name in chosen)
        said = f"together about {in_figures(total)} minutes, {at_once} at a time, as estimated on {where}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)


@papers_app.command("check")
def check_command(
    names: Annotated[list[str], typer.Argument(help="studies with runs (trilemma papers list)")],
    cells: Annotated[int, typer.Option(help="cells of each that are run again", min=1)] = 3,
    jobs: Annotated[int | None, typer.Option(help="runs at a time", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="directory of the runs; default: a fresh one")] = None,
    results: ResultsFolder = RESULTS,
) -> None:
    """Run one seed of some cells again by today's code, and write down whether they are the same.

    What `list` and `compare` say about changed sources then says whether that mattered.
    """
    import tempfile

    from rich.console import Console

    from trilemma.report.progress import GridProgress
    from trilemma_lab.papers import studies
    from trilemma_lab.studies.measured import read_results
    from trilemma_lab.studies.rerun import rerun_cells
    from trilemma_lab.studies.result_files import ResultFiles

    kept = ResultFiles({name: studies[name] for name in names}, results)
    there = {name: read_results(kept.path(name)) for name in kept.studies}
    kept.check_room()
    for name, before in there.items():
        with tempfile.TemporaryDirectory() as fresh, GridProgress(Console(stderr=True)) as watcher:
            folder = (out or Path(fresh)) / name
            found = rerun_cells(name, studies[name], before, cells, folder, jobs, watcher)
        assert found.rerun is not None
        kept.add_rerun(name, before, found.rerun, found.sources[found.rerun.code])
        print(f"{name}: {found.rerun.words(today=True)}")


Quick = Annotated[bool, typer.Option("--quick", help="the results of a quick look")]


@papers_app.command("compare")
def compare_command(name: Name, quick: Quick = False, results: ResultsFolder = RESULTS) -> None:
    """Print ours beside the paper's with a verdict for each, as Markdown."""
    from trilemma_lab.papers import studies
    from trilemma_lab.studies.verdicts import verdict_table

    print(verdict_table(name, *_read(name, results, quick), studies[name].module).markdown())


@papers_app.command("figure")
def figure_command(
    name: Name,
    to: Annotated[Path | None, typer.Option(help="a PNG file; default: NAME.png")] = None,
    quick: Quick = False,
    results: ResultsFolder = RESULTS,
) -> None:
    """Draw a study: ours with their spread, the paper's as hollow marks."""
    from trilemma_lab.studies.figures import picture_of

    print(picture_of(name, *_read(name, results, quick), to or Path(f"{name}.png")))


@papers_app.command("tune")
def tune_command(
    task: Annotated[str, typer.Argument(help="a data set of lp-proj: synthetic00, mnist, …")],
    method: Annotated[str, typer.Argument(help="a row of its tables")],
    rounds: Annotated[int, typer.Option(help="rounds of each run", min=1)] = 60,
    seed: Annotated[int, typer.Option(help="the seed of each run")] = 101,
) -> None:
    """Try lp-proj's grid of hyper-parameters for a method on one seed; validation accuracies, best first."""
    from trilemma_lab.papers.lp_proj import tried

    for accuracy, choice in tried(task, method, rounds, seed):
        print(f"{accuracy:.4f}  {choice}")


def _read(name: str, folder: Path, quick: bool) -> tuple[Results, Paper]:
    from trilemma_lab.papers import studies
    from trilemma_lab.papers.published import paper
    from trilemma_lab.studies.measured import read_results

    study = studies[name]
    found = read_results(folder / f"{name}{'-quick' if quick else ''}.json")
    return found, paper(study.paper).of(name)
