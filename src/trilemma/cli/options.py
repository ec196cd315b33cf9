"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

PluginOption = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="a .py file or a module with your own rules, attacks, …; repeatable"),
]
