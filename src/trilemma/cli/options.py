"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

PluginOption = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="a .py file or a module with your own rules, attacks, …; repeatable"),
]
Clients = Annotated[int, typer.Option("-n", "--clients", help="number of clients")]
Byzantine = Annotated[int, typer.Option("-f", "--byzantine", help="how many may be Byzantine")]
SigmaInd = Annotated[float | None, typer.Option(help="std of a client's own noise")]
SigmaCor = Annotated[float | None, typer.Option(help="std of the noise each pair shares")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
