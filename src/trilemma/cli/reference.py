"""The command line as Markdown, from what the commands declare; part of the documentation site.

>>> "## `trilemma run`" in markdown()
True
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trilemma.cli.app import COMMANDS

HEAD = "# Command line\n\nWhat `--help` says, on one page.\n"


def markdown() -> str:
    """Return every command with its arguments and options."""
    parts = [HEAD]
    for name, lazy in COMMANDS.items():
        parts += _commands(f"trilemma {name}", lazy.load(name))
    return "\n".join(parts)


def _commands(name: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield f"## `{name}`\n"
        yield f"{_text(command.help)}\n"
        rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
        if rows:
            yield "| option | what it says | default |\n|---|---|---|"
            yield "\n".join(rows) + "\n"
    for word in sorted(inner):
        if not inner[word].hidden:
            yield from _commands(f"{name} {word}", inner[word])


def _row(parameter: Any) -> str:
    flag = parameter.param_type_name == "option"
    spelt = parameter.opts if flag else [parameter.human_readable_name]
    if parameter.default is True:
        spelt = [*spelt, *parameter.secondary_opts]  # what turns it off
    names = ", ".join(f"`{name}`" for name in spelt)
    default = (
        "" if parameter.default in (None, False, ()) or callable(parameter.default) else parameter.default
    )
    usual = "required" if parameter.required else f"`{default}`" if str(default) else ""
    return f"| {names} | {_text(getattr(parameter, 'help', '')).replace('|', '/')} | {usual} |"


def _text(help_: str | None) -> str:
    """Return a help text as Markdown: no tags, no marks that tell terminals what not to fill.

    >>> _text("directory; default: runs/<time>-…")
    'directory; default: runs/&lt;time>-…'
    """
    return (help_ or "").replace("\b", "").replace("<", "&lt;").strip()
