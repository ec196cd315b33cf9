"""`trilemma run`: run a configuration over its seeds."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trilemma import config as configuration
from trilemma import report, simulate
from trilemma.cli.progress import ProgressBar
from trilemma.cli.tables import results_table
from trilemma.config import Config
from trilemma.errors import ConfigError


def run_command(
    config: Annotated[
        str | None, typer.Argument(help="a TOML file, or a name (trilemma list configs); default: defaults")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="table.key=value, repeatable")] = None,
    seeds: Annotated[str | None, typer.Option(help="as in 1-5 or 1,3,7")] = None,
    out: Annotated[Path | None, typer.Option(help="directory of the run; default: runs/<time>-…")] = None,
    resume: Annotated[Path | None, typer.Option(help="continue the run in this directory")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    baseline: Annotated[bool, typer.Option(help="also run with nobody lying, plain mean")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Train a federation as CONFIG says and report accuracy beside ε, f and the attack.

    Ctrl-C saves what is finished; --resume DIR continues to the identical final model.
    """
    console = Console(stderr=True, quiet=as_json)
    if resume is not None:
        if config is not None or set_ or seeds or out or device:
            raise ConfigError("--resume continues a run as it was configured; it takes no other settings")
        directory = resume
        settings = simulate.RunDirectory.open(resume).config
    else:
        settings = _settings(config, set_ or [], seeds, device)
        print_notes(settings)
        directory = out or _fresh_directory(settings)

    with ProgressBar(console) as bar:
        try:
            if resume is not None:
                summary = simulate.resume(directory, bar)
            else:
                summary = simulate.run(settings, directory, bar)
        except KeyboardInterrupt:
            console.print(f"stopped; continue with: trilemma run --resume {directory}")
            raise
    free = None
    if baseline and settings.federation.byzantine:
        with ProgressBar(console, "without adversary") as bar:
            free = simulate.run_or_resume(adversary_free(settings), directory / "baseline", bar)

    picture = plot_runs(
        [(summary.rule, directory)], directory / "baseline" if free else None, directory / "curves.png"
    )
    if as_json:
        result = summary.plain() | ({"adversary_free": free.plain()} if free else {})
        print(json.dumps(result))
        return
    screen = Console()
    title = f"{settings.data.name}, {settings.algorithm.name}, {settings.run.rounds} rounds"
    screen.print(results_table([(settings.algorithm.name, summary)], free, title))
    for note in summary.notes:
        screen.print(f"note: {note}", highlight=False, markup=False)
    screen.print(f"{directory}: metrics per round, model, summary.json; curve: {picture}", soft_wrap=True)


def adversary_free(settings: Config) -> Config:
    """Return the same run with nobody lying and the plain mean; noise as before."""
    return settings.with_(
        "federation.byzantine=0", f"federation.tolerate={settings.federation.f}", "aggregation.rule=mean"
    )


def plot_runs(runs: list[tuple[str, Path]], reference: Path | None, target: Path) -> Path:
    """Draw accuracy over rounds for finished runs; `reference` is dashed."""
    curves = [_curve(label, path, dashed=False) for label, path in runs]
    if reference is not None:
        curves.append(_curve("without adversary", reference, dashed=True))
    return report.plot_curves(curves, target)


def _curve(label: str, path: Path, dashed: bool) -> report.Curve:
    directory = simulate.RunDirectory.open(path)
    records = [directory.seed(seed).records() for seed in directory.config.run.seeds]
    return report.Curve.from_records(label, records, dashed=dashed)


def print_notes(settings: Config) -> None:
    """Say on standard error what assignments made of the file."""
    for note in settings.notes:
        Console(stderr=True).print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def _settings(path: str | None, assignments: list[str], seeds: str | None, device: str | None) -> Config:
    extra = list(assignments)
    if seeds is not None:
        extra.append(f"run.seeds='{seeds}'")
    if device is not None:
        extra.append(f"run.device='{device}'")
    return configuration.load(path, extra)


def _fresh_directory(settings: Config) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{settings.data.name}-{settings.algorithm.name}-{settings.aggregation.rule}"
    path = Path("runs") / name
    suffix = 1
    while path.exists():
        suffix += 1
        path = Path("runs") / f"{name}-{suffix}"
    return path
