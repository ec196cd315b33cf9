"""All commands in one place; what a command does is in its own module, imported when it is called.

The rooms need torch, which takes seconds to import: `trilemma --help` must not.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import click
import typer
from typer.core import TyperGroup
from typer.models import ArgumentInfo

from trilemma import __version__


class Lazy(NamedTuple):
    """A command that is not imported yet: its module, its name there, its line in the list of commands.

    `context` is how the words after it are read, where that is not as usual.
    """

    module: str
    name: str
    line: str
    context: dict[str, Any] | None = None

    def load(self, called: str) -> click.Command:
        """Import the command."""
        found = getattr(importlib.import_module(f"trilemma.cli.{self.module}"), self.name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(called, context_settings=self.context)(found)
            found = alone
        return _with_argument_help(typer.main.get_command(found))


COMMANDS = {
    "run": Lazy(
        "run", "run_command", "Train a federation as CONFIG says; accuracy beside ε, f and the attack."
    ),
    "sweep": Lazy(
        "sweep",
        "sweep_command",
        "Run every cell of FILE's table `sweep`; finished cells are skipped, stopped ones continue.",
    ),
    "arena": Lazy(
        "arena",
        "arena_command",
        "Set every rule against liars who know it; the worst case of each, finished cells are skipped.",
    ),
    "table": Lazy(
        "table",
        "table_command",
        "Lay a metric of a sweep's runs out by two keys: Markdown, CSV, Parquet, or a map of colours.",
    ),
    "check": Lazy(
        "check",
        "check_command",
        "Look at a task.py: data, what is trained, how gradients are computed and whether they are right.",
    ),
    "export": Lazy(
        "export",
        "export_command",
        "Write the trained model under its own names: a module's state_dict, as safetensors or .pt.",
    ),
    "list": Lazy(
        "listing",
        "list_command",
        "Show everything that has a name, one line each, or one thing with its options and its reference.",
    ),
    "demo": Lazy(
        "demo",
        "demo_command",
        "Train on phishing with 7 clients of whom 3 lie: trusting, robust, and robust and private.",
    ),
    "papers": Lazy(
        "papers",
        "papers_app",
        "The papers' experiments: run them, and see ours beside theirs.",
    ),
    "privacy": Lazy(
        "privacy", "privacy_command", "Tell what noise guarantees, or which noise a guarantee needs."
    ),
    "bounds": Lazy(
        "privacy",
        "bounds_command",
        "Tell what the papers' theorems promise, constants included, and where they promise nothing.",
    ),
    "audit": Lazy(
        "audit",
        "audit_command",
        "Attack a configuration, a task or a federation's copy; certified ε, empirical bound and ratio.",
    ),
    "plot": Lazy(
        "plot",
        "plot_command",
        "Draw runs: scores over rounds, whom the rule trusted, ε spent, or seconds per stage; PNG or SVG.",
    ),
    "page": Lazy(
        "page",
        "page_command",
        "Show runs as they grow, a privacy planner, studies and federations in a browser; it only reads.",
    ),
    "bench": Lazy(
        "bench",
        "bench_command",
        "Measure speed and exactness on this machine; options after the name are the benchmark's own.",
        {"allow_extra_args": True, "allow_interspersed_args": False},
    ),
    "federation": Lazy(
        "federation",
        "federation_app",
        "A real federation on Flower: TLS, node authentication, keys, crashes and liars.",
    ),
}
"""Every command. Its line is the first of its own help: a test keeps the two alike."""


class LazyGroup(TyperGroup):
    """The commands by name. A command that is called is imported, one that is only listed is not."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the list."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return what the list of commands shows."""
        if cmd_name not in COMMANDS:
            return None
        return click.Command(cmd_name, help=COMMANDS[cmd_name].line)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else COMMANDS[name].load(name), rest


def _with_argument_help(command: click.Command) -> click.Command:
    """Say what arguments mean: typer 0.20 sets their help before click 8.5 sets it to None."""
    for below in getattr(command, "commands", {}).values():
        _with_argument_help(below)
    hints: dict[str, Any] = {}
    if command.callback is not None:
        hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for parameter in command.params:
        notes = get_args(hints.get(parameter.name or ""))
        for note in notes[1:] if isinstance(parameter, click.Argument) else ():
            if isinstance(note, ArgumentInfo):
                parameter.help = note.help
    return command


app = typer.Typer(
    name="trilemma",
    cls=LazyGroup,
    help="Federated learning that is private, Byzantine-robust and useful at the same time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trilemma {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Federated learning that is private, Byzantine-robust and useful at the same time."""
