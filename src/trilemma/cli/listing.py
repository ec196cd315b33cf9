"""`trilemma list`: everything that has a name, and what may be said about each."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trilemma.base import plugins
from trilemma.cli.options import PluginOption
from trilemma.experiment.ready import ReadyConfig
from trilemma.experiment.rooms import Described, find, rooms


def list_command(
    name: Annotated[
        str | None, typer.Argument(help="a kind (rules, attacks, models, configs, …), or the name of a thing")
    ] = None,
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """List rules, attacks, models, …, or explain one of them.

    With a name, shows its options, their limits, and its reference.
    """
    plugins.load(plugin or ())
    known = rooms()
    if name is not None and name not in known:
        _details(find(name), as_json)
        return
    shown = known if name is None else {name: known[name]}
    if as_json:
        print(json.dumps({k: {name: r.summary(name) for name in r} for k, r in shown.items()}))
        return
    console = Console()
    for title, registry in shown.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for entry in sorted(registry):
            table.add_row(Text(entry, style="bold"), Text(registry.summary(entry)))
        console.print(table, end="\n\n")


def _details(found: list[Described], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(replace(one, thing=None)) for one in found]))
        return
    console = Console(highlight=False)
    for one in found:
        console.print(Text.assemble((one.name, "bold"), f" ({one.kind}): {one.summary}"))
        if isinstance(one.thing, ReadyConfig):
            console.print(Text(one.thing.text))
            continue
        for option in one.options:
            default = f"default: {option.default}" if option.default else "may be left out"
            needed = "required" if option.required else default
            console.print(Text.assemble("  ", (option.name, "bold"), f": {option.allowed}; {needed}"))
            if option.description:
                console.print(Padding(Text(option.description), (0, 0, 0, 6), expand=False))
        if not one.options:
            console.print("It has no options.")
        if one.reference:
            console.print(Text(f"Reference: {one.reference}"))
        console.print()
