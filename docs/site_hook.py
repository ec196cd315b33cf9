"""What the site shows beside docs/: files of the root, the command line, the rooms' public names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import trilemma

ROOT = Path(__file__).parents[1]
OF_THE_ROOT = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages that stand in the root of the repository, where people look for them, and their place on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    from trilemma.cli.reference import markdown as command_line

    for name, where in OF_THE_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, where, content=text))
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    files.append(File.generated(config, "reference/python.md", content=_python()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the root into links to their pages."""
    up = "../" * page.file.src_uri.count("/")
    for name, where in OF_THE_ROOT.items():
        markdown = re.sub(rf"\]\((?:\.\./)+{re.escape(name)}", f"]({up}{where}", markdown)
    return markdown


def _python() -> str:
    """Return the page of the rooms and their public names."""
    parts = ["# Python\n\nThe rooms, and in each what it shows to others.\n"]
    for room in sorted(name for name in trilemma.__all__ if name.islower() and name not in ("load", "run")):
        parts.append(f"::: trilemma.{room}\n    options:\n      show_submodules: false\n")
    parts.append("::: trilemma.api\n")
    return "\n".join(parts)
