"""`trilemma bench`: what things cost on this machine, beside their peers.

The benchmarks are scripts in `benchmarks/` of a checkout and no part of the package: they need peers,
compilers and devices that users do not. The command finds them and runs one in a process of its own.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import trilemma
from trilemma.base.errors import UserError, nearest

MAIN = 'if __name__ == "__main__":'
"""The line that makes a file there a benchmark, and not a part of others."""


def bench_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="which benchmark; without one they are listed")] = "",
) -> None:
    """Measure speed and exactness on this machine.

    Options after the name are the benchmark's own.
    """
    scripts = benchmarks(Path(trilemma.__file__).parents[2], Path.cwd())
    if not name:
        for each, script in scripts.items():
            typer.echo(f"{each:<16}{_title(script)}")
        return
    if name not in scripts:
        raise UserError(f"no benchmark is called {name!r}: {nearest(name, scripts)}")
    raise typer.Exit(subprocess.call([sys.executable, str(scripts[name]), *context.args]))


def benchmarks(*checkouts: Path) -> dict[str, Path]:
    """Return the scripts of the first of these folders that is a checkout, by name."""
    for folder in checkouts:
        if (folder / "src" / "trilemma").is_dir():
            scripts = sorted((folder / "benchmarks").glob("*.py"))
            return {script.stem: script for script in scripts if MAIN in script.read_text()}
    raise UserError(
        "benchmarks are not part of the installed package, they come with its source: run `trilemma bench` "
        "inside a checkout of the repository, the folder that has benchmarks/ and src/trilemma/ in it"
    )


def _title(script: Path) -> str:
    """The first line of a script's docstring."""
    return (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n")[0]
