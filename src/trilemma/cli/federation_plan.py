"""`trilemma federation configure` and `statistics`: what is run, and statistics before a training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Annotated

import typer

from trilemma.cli.federation_status import Folder
from trilemma.cli.options import PluginOption
from trilemma.cli.output import say

RUN = "statistics"
"""What a run of statistics is called where nothing is said."""


def configure_command(
    folder: Folder,
    config: Annotated[str, typer.Argument(help="TOML file, or a name: what is run from now on")],
    plugin: PluginOption = None,
) -> None:
    """Put another configuration into the parties' folders that are here; ledgers and budgets stay.

    It is another plan: each client's owner allows it, as any. A pilot on one machine allows it at once.
    """
    from trilemma.cli.federation import settings_of, settled
    from trilemma.federation.operations.replanning import configure
    from trilemma.federation.party.layout import parties
    from trilemma.task import Task

    first = parties(folder)[0]
    facts = first.federation
    own = None if first.task is None else Task.from_file(first.task, facts.clients)
    settings = settled(settings_of(config, facts.clients, own, plugin or []), own, facts.examples)
    for party in configure(folder, settings):
        say(f"{party.folder}")
    if not facts.on_one_machine:
        say(
            "Every other party does the same; each owner then decides: trilemma federation allow client-i RUN"
        )


def statistics_command(
    folder: Folder,
    name: Annotated[str, typer.Option(help="name of the run; one that is finished is shown")] = RUN,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Run the configured statistics, or show them: what the sites' records are like, before a training.

    Each client pays for its answer in its own ledger, once. The figures are the server's, and stand
    in the run's folder as statistics.json.
    """
    from trilemma.cli.federation import run_command
    from trilemma.cli.statistics import show
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


COMMANDS: dict[str, Callable[..., None]] = {"configure": configure_command, "statistics": statistics_command}
"""The commands of this module by name, for `trilemma federation`."""
