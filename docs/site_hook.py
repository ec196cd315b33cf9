"""What the site shows beside docs/: files of the root, the command line, the rooms' public names."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

import trilemma
from trilemma.cli.app import command_named, command_names

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
OF_THE_ROOT = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages that stand in the root of the repository, where people look for them, and their place on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for name, where in OF_THE_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, page in OF_THE_ROOT.items():
            text = text.replace(f"]({other}", f"]({page}")
        files.append(File.generated(config, where, content=text))
    files.append(File.generated(config, "reference/command-line.md", content=_command_line()))
    for name, text in _python().items():
        files.append(File.generated(config, f"reference/python/{name}.md", content=text))
    for path in NOTEBOOKS.glob("*.ipynb"):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=_notebook(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the root into links to their pages."""
    up = "../" * page.file.src_uri.count("/")
    for name, where in OF_THE_ROOT.items():
        markdown = re.sub(rf"\]\((?:\.\./)+{re.escape(name)}", f"]({up}{where}", markdown)
    return markdown


def _notebook(path: Path) -> str:
    """Return a notebook as a page: texts, code, and what its cells showed when it was last run."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = re.sub(r"\]\(([\w-]+)\.ipynb\)", r"](\1.md)", text.replace("](../../docs/", "](../"))
        else:
            text = f"```python\n{text}\n```"
        parts += [text, *map(_shown, cell.get("outputs", []))]
    return "\n\n".join(parts)


def _shown(output: dict[str, Any]) -> str:
    """Return what a cell showed, in the richest form there is."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="the picture" src="data:image/png;base64,{data["image/png"]}">'
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            return "".join(data[kind])
    return f"```text\n{''.join(output.get('text', data.get('text/plain', ''))).rstrip()}\n```"


def _command_line() -> str:
    """Return the page of the commands: what `--help` says."""
    parts = ["# Command line\n\nWhat `--help` says, on one page.\n"]
    for name in command_names():
        command = command_named(name)
        assert command is not None
        context = click.Context(command)
        parts.append(
            get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="trilemma", indent=1)
        )
    return "\n".join(parts)


def _python() -> dict[str, str]:
    """Return the pages of the Python reference: one of contents, `trilemma.run`, one for each room."""
    rooms = {name: getattr(trilemma, name) for name in trilemma.__all__}
    rooms = {name: room for name, room in sorted(rooms.items()) if inspect.ismodule(room)}
    listed = ["# Python", "", "| page | what it has |", "|---|---|"]
    listed.append("| [trilemma.run](api.md) | A run in one call, and what it takes and returns. |")
    pages = {"api": "# trilemma.run\n\n::: trilemma.api\n    options:\n      heading_level: 2\n"}
    for name, room in rooms.items():
        first = (inspect.getdoc(room) or "").partition("\n")[0]
        listed.append(f"| [trilemma.{name}]({name}.md) | {first.replace('|', chr(92) + '|')} |")
        pages[name] = (
            f"# trilemma.{name}\n\n::: {room.__name__}\n"
            "    options:\n      show_submodules: false\n      show_root_heading: false\n"
        )
    return {"index": "\n".join(listed) + "\n", **pages}
