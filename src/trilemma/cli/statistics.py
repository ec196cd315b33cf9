"""`trilemma statistics`, and how `trilemma federation statistics` shows what was told."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilemma.cli.federation_status import Folder
from trilemma.cli.options import PluginOption
from trilemma.cli.output import doing, say

if TYPE_CHECKING:
    from trilemma.survey.result import StatisticsResult

RUN = "statistics"
"""What a federation's run of statistics is called where nothing is said."""


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
    from trilemma.survey.words import lines

    for line in lines(result):
        say(line)
