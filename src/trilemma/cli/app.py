"""All commands in one place; what a command does is in its own module."""

from __future__ import annotations

import typer

from trilemma.cli.bench import PASS_ON, bench_command
from trilemma.cli.demo import demo_command
from trilemma.cli.federation import federation_app
from trilemma.cli.listing import list_command
from trilemma.cli.papers import papers_command
from trilemma.cli.privacy import bounds_command, privacy_command
from trilemma.cli.run import run_command

app = typer.Typer(
    name="trilemma",
    help="Federated learning that is private, Byzantine-robust and useful at the same time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("run")(run_command)
app.command("list")(list_command)
app.command("demo")(demo_command)
app.command("papers")(papers_command)
app.command("privacy")(privacy_command)
app.command("bounds")(bounds_command)
app.command("bench", context_settings=PASS_ON)(bench_command)
app.add_typer(federation_app, name="federation")
