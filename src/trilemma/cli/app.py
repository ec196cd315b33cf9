"""All commands in one place; what a command does is in its own module, imported when it is called.

The rooms need torch, which takes seconds to import: `trilemma --help` must not.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import click
import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.models import ArgumentInfo

from trilemma import __version__
from trilemma.base.errors import nearest
from trilemma.base.plugins import offered


class Lazy(NamedTuple):
    """A command that is not imported yet: its module, its name there, its group and its line in `--help`."""

    module: str
    name: str
    group: str
    line: str

    def load(self, called: str) -> click.Command:
        """Import the command."""
        return as_command(called, getattr(importlib.import_module(f"trilemma.cli.{self.module}"), self.name))


def as_command(called: str, found: Any) -> click.Command:
    """Return a function, or a group of commands, as a command."""
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(called)(found)
        found = alone
    return _with_whole_help(typer.main.get_command(found))


COMMANDS = {
    "run": Lazy("run", "run_command", "Train", "Train a federation, simulated on this machine."),
    "sweep": Lazy(
        "sweep", "sweep_command", "Train", "Run a grid of configurations; a stopped sweep continues."
    ),
    "demo": Lazy(
        "demo", "demo_command", "Train", "Show three liars among seven clients break the mean but not CAF."
    ),
    "list": Lazy(
        "listing", "list_command", "Configure", "List rules, attacks, models, …, or explain one of them."
    ),
    "check": Lazy(
        "check", "check_command", "Configure", "Check a task.py: your own data, model, loss and gradients."
    ),
    "statistics": Lazy(
        "statistics",
        "statistics_command",
        "Configure",
        "Show private statistics of all clients' records, simulated on this machine.",
    ),
    "table": Lazy(
        "table",
        "table_command",
        "Look at results",
        "Show the table of a finished run, or lay out a metric of a sweep's runs by two keys.",
    ),
    "plot": Lazy(
        "plot", "plot_command", "Look at results", "Draw runs: scores, whom the rule trusted, ε, or seconds."
    ),
    "page": Lazy(
        "page", "page_command", "Look at results", "Show runs, studies and federations in a browser."
    ),
    "export": Lazy(
        "export", "export_command", "Look at results", "Write a trained model to a file, as its state_dict."
    ),
    "privacy": Lazy(
        "privacy",
        "privacy_command",
        "Guarantees",
        "Compute what a noise guarantees, or the noise a guarantee needs.",
    ),
    "bounds": Lazy(
        "privacy",
        "bounds_command",
        "Guarantees",
        "Compute how far liars can move each rule, and what they can hide in the noise.",
    ),
    "audit": Lazy(
        "audit",
        "audit_command",
        "Guarantees",
        "Attack a certified ε, and show the ε an adversary finds.",
    ),
    "attack": Lazy(
        "attack",
        "attack_command",
        "Guarantees",
        "Attack a final model: membership, attributes, inversion, a mark; each beside what is certified.",
    ),
    "evidence": Lazy(
        "evidence",
        "evidence_app",
        "Guarantees",
        "Write one signed folder about a run for who decides and who audits, or check one.",
    ),
    "federation": Lazy("federation", "federation_app", "Deploy", "Run a real federation."),
}
"""Every command of the core. Its line is the first of its own help: a test keeps the two alike."""


def command_named(name: str) -> click.Command | None:
    """Return a command of the core or of an installed package; None where there is none of that name."""
    if name in COMMANDS:
        return COMMANDS[name].load(name)
    further = offered("commands")
    return as_command(name, further[name].load()) if name in further else None


def command_names() -> list[str]:
    """Return the names of all commands: the core's, then those of installed packages."""
    return [*COMMANDS, *sorted(set(offered("commands")) - set(COMMANDS))]


class LazyGroup(TyperGroup):
    """The commands by name. A command that is called is imported, one that is only listed is not."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the list."""
        return command_names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return what the list of commands shows."""
        if cmd_name in COMMANDS:
            group, line = COMMANDS[cmd_name].group, COMMANDS[cmd_name].line
        else:
            found = command_named(cmd_name)
            if found is None:
                return None
            group, line = "From installed packages", found.get_short_help_str(limit=200)
        listed = click.Command(cmd_name, help=line)
        listed.rich_help_panel = group  # type: ignore[attr-defined]  # where typer looks
        return listed

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called."""
        if args and args[0] not in command_names():
            ctx.fail(f"no command is called {args[0]!r}: {nearest(args[0], command_names())}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else command_named(name), rest


def _with_whole_help(command: click.Command) -> click.Command:
    """Mend three things of typer 0.20's help: broken lines, arguments without a word, brackets.

    Lines are broken as in the source; the help of arguments is set before click 8.5 sets it to None; and
    [aggregation] is read as a style.
    """
    command.help = _filled(command.help)
    for below in getattr(command, "commands", {}).values():
        _with_whole_help(below)
    hints: dict[str, Any] = {}
    if command.callback is not None:
        hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for parameter in command.params:
        notes = get_args(hints.get(parameter.name or ""))
        for note in notes[1:] if isinstance(parameter, click.Argument) else ():
            if isinstance(note, ArgumentInfo):
                parameter.help = note.help
        if isinstance(parameter, click.Option | click.Argument) and parameter.help:
            parameter.help = escape(parameter.help)
    return command


def _filled(text: str | None) -> str | None:
    r"""Return a help text whose paragraphs are one line each; those that begin with \b stay as they are.

    >>> _filled("What it does.\n\nWhat more\nthere is.")
    'What it does.\n\nWhat more there is.'
    """
    if text is None:
        return None
    paragraphs = text.split("\n\n")
    filled = (one if one.startswith("\b") else " ".join(one.split("\n")) for one in paragraphs)
    return escape("\n\n".join(filled))


app = typer.Typer(
    name="trilemma",
    cls=LazyGroup,
    help="Federated learning that is private, Byzantine-robust and useful at the same time.",
    no_args_is_help=True,
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
