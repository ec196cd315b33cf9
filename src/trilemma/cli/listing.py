"""`trilemma list`: everything that has a name, one line each."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from trilemma import aggregation, attacks, data, learning, models
from trilemma.errors import ConfigError, nearest
from trilemma.privacy.accountants import accountants
from trilemma.registry import Registry


def registries() -> dict[str, Registry[Any]]:
    """Return every registry by the word users know it by."""
    return {
        "rules": aggregation.rules,
        "mixing": aggregation.mixings,
        "attacks": attacks.attacks,
        "algorithms": learning.algorithms,
        "data": data.datasets,
        "partitions": data.partitions,
        "models": models.models,
        "accountants": accountants,
    }


def list_command(
    kind: Annotated[str | None, typer.Argument(help="rules, mixing, attacks, algorithms, data, …")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show every rule, attack, algorithm, data set, partition and model, one line each."""
    known = registries()
    if kind is not None and kind not in known:
        raise ConfigError(f"nothing is called {kind!r}: {nearest(kind, known)}")
    shown = known if kind is None else {kind: known[kind]}
    if as_json:
        print(json.dumps({k: {name: r.summary(name) for name in r} for k, r in shown.items()}))
        return
    console = Console()
    for title, registry in shown.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name in sorted(registry):
            table.add_row(f"[bold]{name}[/]", registry.summary(name))
        console.print(table, end="\n\n")
