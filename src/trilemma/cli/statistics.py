"""`trilemma statistics`, and how `trilemma federation statistics` shows what was told."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilemma.cli.federation_status import Folder
from trilemma.cli.options import PluginOption
from trilemma.cli.output import doing, say

if TYPE_CHECKING:
    from trilemma.report.statistics import StatisticsResult
    from trilemma.survey.figures import ColumnFigures
    from trilemma.survey.told import ToldFigure

RUN = "statistics"
"""What a federation's run of statistics is called where nothing is said."""

FEW = 6
"""Distances between sites that are shown: the largest; `--json` has all."""

SHOWN = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles that are shown."""


def statistics_command(
    config: Annotated[
        str, typer.Argument(help='a TOML file whose [algorithm] is "statistics", with its columns')
    ],
    task: Annotated[Path, typer.Option(help="a task.py with your own records")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="table.key=value, repeatable")] = None,
    out: Annotated[Path | None, typer.Option(help="a folder for statistics.json")] = None,
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Show private statistics of all clients' records, simulated on this machine.

    Histograms, means, variances, quantiles, correlations and how sites differ, each with its
    noise and an interval that holds whatever the sites that may lie have sent; and what they
    propose for training.
    """
    if not as_json:
        doing(f"statistics: reading {config} and all clients' records")
    from trilemma import experiment as configuration
    from trilemma.report.statistics import simulated_statistics
    from trilemma.task import Task

    own = Task.from_file(task)
    settings = configuration.load(config, set_ or [], configuration.Own(own.clients_known), plugin or [])
    result = simulated_statistics(settings, own)
    show(result, as_json)
    if out is not None:
        path = result.save(out)
        if not as_json:
            say(f"{path}")


def federation_statistics_command(
    folder: Folder,
    name: Annotated[str, typer.Option(help="name of the run; one that is finished is shown")] = RUN,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Run the configured statistics, or show them: what the sites' records are like, before a training.

    Each client pays for its answer in its own ledger, once. The figures are the server's, and stand
    in the run's folder as statistics.json.
    """
    from trilemma.cli.federation import run_command
    from trilemma.federation.party.layout import server_in
    from trilemma.report import deployed_statistics

    server = server_in(folder)
    result = deployed_statistics(server, name)
    if result is None:
        with redirect_stdout(sys.stderr):  # what is asked for is the figures
            run_command(folder, name, limit=None, replace=False)
        result = deployed_statistics(server, name)
    assert result is not None
    show(result, as_json)


def show(result: StatisticsResult, as_json: bool) -> None:
    """Print what was told."""
    if as_json:
        print(json.dumps(result.plain(), ensure_ascii=False))
        return
    for line in _lines(result):
        say(line)


def _number(number: float | None) -> str:
    """Return a number in three or four digits; "…" where nothing is known."""
    if number is None:
        return "…"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _said(figure: ToldFigure | None) -> str:
    """Return a number with its interval.

    >>> from trilemma.survey.told import ToldFigure
    >>> _said(ToldFigure(53.807, 0.55, 52.69, None)), _said(ToldFigure(None, None, 0.0, 12345.6))
    ('53.8 (52.7 to …)', '… (0 to 12,346)')
    """
    if figure is None:
        return "too few"
    return f"{_number(figure.value)} ({_number(figure.low)} to {_number(figure.high)})"


def _lines(result: StatisticsResult) -> Iterator[str]:
    held = result.verdict.get("guarantee")
    yield (
        f"ε = {held['epsilon']:.3g} at δ = {held['delta']:g} for one record, under {held['threat']}"
        if held
        else f"no privacy is promised: {result.verdict['no_guarantee']['reason']}"
    )
    yield (
        f"{len(result.heard)} of {result.clients} sites by {result.rule}, of which {result.liars} may lie; "
        f"in brackets intervals of {result.level:.0%}. {_said(result.records)} records"
    )
    for one in result.columns:
        yield from _of_column(one)
    for pair in result.correlations:
        yield f"correlation of {' and '.join(pair.columns)}: {_said(pair.figure)}"
    for site in result.sites:
        labels = "".join(f"; {cell.name}: {_said(cell.count)}" for cell in site.labels if cell.count)
        yield f"site {site.site}: {_said(site.records.count)} records{labels}"
    for drift in sorted(result.drift, key=lambda one: -(one.distance.low or 0.0))[:FEW]:
        one_site, other = drift.sites
        yield f"sites {one_site} and {other} are {_said(drift.distance)} apart in {drift.column}; √2 at most"
    yield from _proposed(result)
    for note in result.notes:
        yield f"note: {note}"


def _of_column(column: ColumnFigures) -> Iterator[str]:
    yield f"{column.name}: {_said(column.records)} records, missing in a share of {_said(column.missing)}"
    if column.mean is not None:
        yield f"    mean {_said(column.mean)}, variance {_said(column.variance)}"
    if column.quantiles:
        shown = (one for one in column.quantiles if one.share in SHOWN)
        yield "    quantiles " + ", ".join(f"{one.share:.0%}: {_said(one.figure)}" for one in shown)
    else:
        cells = [f"{cell.name}: {_said(cell.count)}" for cell in column.cells if cell.count]
        yield f"    {', '.join(cells) or 'no count stands out of the noise'}"


def _proposed(result: StatisticsResult) -> Iterator[str]:
    """Say what is proposed for training."""
    found = result.proposal
    for name, scale in found.scales.items():
        yield f"proposed: scale {name} as ({name} − {scale.centre:g}) / {scale.spread:g}"
    for name, bounds in found.bounds.items():
        yield f"proposed: columns.{name} = {{low = {bounds.low:g}, high = {bounds.high:g}}}"
    if found.clip is not None:
        yield f"proposed: [privacy] clip = {found.clip:g}"
    if found.class_weights:
        weights = ", ".join(f"{name}: {weight:g}" for name, weight in found.class_weights.items())
        yield f"proposed: class weights {weights}"
