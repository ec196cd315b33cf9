"""Read the pages of the documentation, and run what stands in them.

A page is run from top to bottom in a folder of its own:

    ```python                     is run; all such blocks of a page share their names
    ```python title="task.py"     is written to that file; so is any other block with a title
    ```sh                         is run line by line; `trilemma …` in this process
    ```text                       is what the block before it prints: compared, `…` stands for anything

A block after `<!-- not run: reason -->` is only read, and so are blocks without a language. A comment
`<!-- before the next block … -->` holds Python that a reader does not need to see: what stands for the
reader's own data.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n\s*)?(^<!-- before the next block\n(?P<before>.*?)^-->\n)?"
    r"^```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block of a page: its language, its file's name if it has one, and where it begins.

    `before` is Python that is run first and not shown.
    """

    language: str
    title: str
    text: str
    line: int
    skipped: bool
    before: str = ""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        title = _TITLE.search(found["rest"])
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(
            found["language"],
            title[1] if title else "",
            found["text"],
            line,
            found["skip"] is not None,
            found["before"] or "",
        )


def run_page(page: Path, folder: Path) -> int:
    """Run a page's blocks in a folder and return how many were run; an AssertionError names page and line."""
    names: dict[str, object] = {"__name__": "__page__"}
    printed, count = "", 0
    with contextlib.chdir(folder):
        for block in blocks(page):
            where = f"{os.path.relpath(page, ROOT)}, line {block.line}"
            if block.skipped:
                continue
            if block.title:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                exec(compile(block.before, f"{where}, before it", "exec"), names)
                printed = _run_python(block, names, where)
                count += 1
            elif block.language == "sh":
                printed = "".join(_run_command(line, where) for line in _lines(block.text))
                count += 1
            elif block.language == "text":
                alike = re.fullmatch(_pattern(block.text), " ".join(printed.split()), re.DOTALL)
                assert alike, f"{where}: the page says\n{block.text}\nand this came\n{printed}"
    return count


def _pattern(text: str) -> str:
    """Return a pattern for what may be printed: blanks are alike, and `…` stands for anything."""
    return ".*?".join(re.escape(part) for part in " ".join(text.split()).split("…"))


def _run_python(block: Block, names: dict[str, object], where: str) -> str:
    out = io.StringIO()
    # Blank lines before it, so that a traceback has the page's own line numbers.
    code = compile("\n" * block.line + block.text, where, "exec")
    with contextlib.redirect_stdout(out):
        exec(code, names)  # the page is ours
    return out.getvalue()


def _lines(text: str) -> Iterator[str]:
    joined = text.replace("\\\n", " ")
    return (line.split(" #")[0].strip() for line in joined.splitlines() if line.strip() and line[0] != "#")


def _run_command(line: str, where: str) -> str:
    words = shlex.split(line)
    if words[0] == "trilemma" and ">" not in words:
        from trilemma.cli import app

        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, f"{where}: {line}\n{done.output}\n{done.exception!r}"
        return done.stdout
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=280, env={**os.environ, "PATH": path}
    )
    assert ended.returncode == 0, f"{where}: {line}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
