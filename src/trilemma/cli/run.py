"""`trilemma run`: run a configuration over its seeds."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilemma.base.errors import ConfigError
from trilemma.cli.options import PluginOption
from trilemma.cli.output import doing

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from trilemma.experiment import Config
    from trilemma.report import Result
    from trilemma.simulate import Ranks
    from trilemma.task import Learner, Task


def run_command(
    config: Annotated[
        str | None, typer.Argument(help="a TOML file, or a name (trilemma list configs); default: defaults")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="table.key=value, repeatable")] = None,
    seeds: Annotated[str | None, typer.Option(help="as in 1-5 or 1,3,7")] = None,
    out: Annotated[Path | None, typer.Option(help="directory of the run; default: runs/<time>-…")] = None,
    resume: Annotated[Path | None, typer.Option(help="continue the run in this directory")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    task: Annotated[Path | None, typer.Option(help="a task.py with your own model and data")] = None,
    baseline: Annotated[bool, typer.Option(help="also run with nobody lying, plain mean")] = False,
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Train a federation, simulated on this machine.

    Shows accuracy beside ε, f and the attack. Ctrl-C saves what is finished; --resume DIR continues to
    the identical final model.

    Over several processes, which share the clients: torchrun --nproc-per-node 4 -m trilemma run …
    """
    if not as_json:
        doing(f"run: reading {resume or config or 'the defaults'}, data and model")
    from rich.console import Console

    from trilemma import report, simulate
    from trilemma.simulate.directory import check_free
    from trilemma.simulate.trackers import track
    from trilemma.task import Task

    console = Console(stderr=True, quiet=as_json)
    if resume is not None:
        if config is not None or set_ or seeds or out or device or task or plugin:
            raise ConfigError("--resume continues a run as it was configured; it takes no other settings")
        directory = resume
        opened = simulate.RunDirectory.open(resume)
        settings, own = opened.config, opened.task()
    else:
        own = None if task is None else Task.from_file(task)
        settings = _settings(config, set_ or [], seeds, device, own, plugin or [])
        directory = out or simulate.named_directory(settings)
        check_free(directory)
    ranks = simulate.joined(settings.run.device)
    if ranks is not None:
        if baseline:
            raise ConfigError("--baseline is a second run: start it by itself, over as many processes")
        _share(ranks, settings, own, directory, resume is not None, console)
        if not ranks.leads:
            return
    if own is not None and resume is None and ranks is None:
        own = own.of(settings.federation.clients)
    if ranks is None:
        _train(settings, own, directory, resume is not None, baseline, console)
    result = report.load(directory)
    pictures = [result.plot(), result.plot(kind="suspects")]
    track(directory, result.config, result.summary, result.markdown(), pictures)
    if as_json:
        free = {} if result.baseline is None else {"adversary_free": result.baseline.summary.plain()}
        print(json.dumps(result.summary.plain() | free))
    else:
        _show(result, pictures)
    if result.summary.failed:
        typer.echo("error: every seed diverged, so there is no result: try a smaller lr, or a clip", err=True)
        raise typer.Exit(1)


def _announced(asked: Config, console: Console) -> Callable[[Config, Learner | None], None]:
    """Return a function that says what was chosen, and which parameters are trained and sent."""
    from trilemma.task.inspection import trained

    def say(settings: Config, learner: Learner | None) -> None:
        chosen = settings.notes[len(asked.notes) :]
        for line in (*chosen, *([] if learner is None else trained(learner))):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return say


def _train(
    settings: Config, task: Task | None, directory: Path, resume: bool, baseline: bool, console: Console
) -> None:
    from trilemma import simulate
    from trilemma.report.progress import ProgressBar
    from trilemma.report.run_metadata import BASELINE

    with ProgressBar(console) as bar:
        try:
            if resume:
                simulate.resume(directory, bar, task)
            else:
                simulate.run(settings, directory, bar, task, announce=_announced(settings, console))
        except KeyboardInterrupt:
            console.print(f"stopped; continue with: trilemma run --resume {directory}")
            raise
    if baseline and settings.federation.byzantine:
        with ProgressBar(console, "without liars") as bar:
            honest = simulate.without_liars(simulate.RunDirectory.open(directory).config)
            simulate.run_or_resume(honest, directory / BASELINE, bar, task)


def _share(
    ranks: Ranks, settings: Config, task: Task | None, directory: Path, resume: bool, console: Console
) -> None:
    """Train over all processes; the first one shows how far they are."""
    from trilemma import simulate
    from trilemma.report.progress import ProgressBar

    directory = Path(ranks.everywhere(str(directory)))
    with ProgressBar(console) if ranks.leads else nullcontext() as bar:
        if resume:
            simulate.resume(directory, bar, task, ranks)
        else:
            simulate.run(settings, directory, bar, task, ranks)
    simulate.left()


def _show(result: Result, pictures: list[Path]) -> None:
    from rich.console import Console

    screen = Console()
    screen.print(result)
    for note in result.summary.notes:
        screen.print(f"note: {note}", highlight=False, markup=False)
    drawn = ", ".join(picture.name for picture in pictures)
    files = f"metrics per round, model, summary.json; pictures: {drawn}"
    screen.print(f"{result.directory}: {files}", soft_wrap=True, markup=False)


def _settings(
    path: str | None,
    assignments: list[str],
    seeds: str | None,
    device: str | None,
    task: Task | None,
    plugins: list[str],
) -> Config:
    from rich.console import Console

    from trilemma import experiment as configuration

    extra = list(assignments)
    if seeds is not None:
        extra.append(f"run.seeds='{seeds}'")
    if device is not None:
        extra.append(f"run.device='{device}'")
    own = None if task is None else configuration.Own(task.clients_known)
    settings = configuration.load(path, extra, own, plugins)
    idle = settings.attack.name != "none" and not settings.federation.byzantine
    if idle and "byzantine" not in settings.source.get("federation", {}):
        raise ConfigError(
            f"[attack] name = {settings.attack.name!r}, and nobody plays it: [federation] byzantine is not "
            "said; allowed: 1 or more (or 0, to leave the attack out for once)"
        )
    nobody = f"nobody plays the attack {settings.attack.name}: [federation] byzantine = 0"
    for note in (*settings.notes, *([nobody] if idle else [])):  # on standard error, before anything runs
        Console(stderr=True).print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    return settings
