"""`trilemma list`: everything that has a name, and what may be said about each."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trilemma import plugins
from trilemma.cli.options import PluginOption
from trilemma.config.ready import ReadyConfig
from trilemma.config.rooms import Described, find, rooms


def list_command(
    name: Annotated[
        str | None, typer.Argument(help="a kind (rules, attacks, models, configs, …), or the name of a thing")
    ] = None,
    plugin: PluginOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show everything that has a name, one line each, or one thing with its options and its reference."""
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
        table = _table(title)
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
        if one.options:
            table = _table()
            for heading in ("option", "allowed", "default", ""):
                table.add_column(heading)
            table.show_header = True
            for option in one.options:
                default = "required" if option.required else option.default or "–"
                row = (option.name, option.allowed, default, option.description)
                table.add_row(*(Text(cell) for cell in row))
            console.print(table)
        else:
            console.print("It has no options.")
        if one.reference:
            console.print(Text(f"Reference: {one.reference}"))
        console.print()


def _table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
