"""After a commit that only moved modules: results know their sources by the new paths.

    python -m trilemma_lab.studies.moved COMMIT

COMMIT moves files and changes the imports that follow, and nothing else: whoever calls this says so. What was
made by the sources before it is then written down as made by those after it. Sources that had changed already
get their new path and stay changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trilemma_lab.studies.sources import code_of, digest_of

Moves = Mapping[tuple[str, str], tuple[str, str]]
"""From a source's path and digest before to those after."""

PACKAGES = ("src/trilemma/", "lab/src/trilemma_lab/")


def key_of(path: str) -> str:
    """Return the name by which results know a file of the repository.

    >>> key_of("src/trilemma/base/keys.py"), key_of("lab/src/trilemma_lab/papers/costs.py")
    ('base/keys.py', 'trilemma_lab/papers/costs.py')
    """
    return path.removeprefix("src/trilemma/").removeprefix("lab/src/")


def moved(text: str, moves: Moves, paths: Mapping[str, str]) -> str:
    """Return the text of a file of results with its sources renamed.

    >>> old = '{"sources": {"1ec5": {"a.py": "11", "b.py": "22"}}, "code": "1ec5"}'
    >>> new = moved(old, {("a.py", "11"): ("c/a.py", "33")}, {"a.py": "c/a.py"})
    >>> json.loads(new)["sources"][json.loads(new)["code"]]
    {'b.py': '22', 'c/a.py': '33'}
    """
    whole: dict[str, Any] = json.loads(text)
    found: dict[str, dict[str, str]] = {}
    for code, sources in whole["sources"].items():
        after = sorted(moves.get(one, (paths.get(one[0], one[0]), one[1])) for one in sources.items())
        found[code_of(dict(after))] = dict(after)
        text = text.replace(code, code_of(dict(after)))  # in cells too, which name the code they are by
    return json.dumps({**json.loads(text), "sources": found}, indent=1, ensure_ascii=False) + "\n"


def of_commit(commit: str) -> tuple[Moves, Mapping[str, str]]:
    """Return what a commit did to digests and to paths."""
    told = _git("diff", "-M40%", "--name-status", f"{commit}~1", commit)
    renamed: dict[str, str] = {
        parts[1]: parts[2] for line in told.splitlines() if (parts := line.split("\t"))[0][0] == "R"
    }
    moves: dict[tuple[str, str], tuple[str, str]] = {}
    for old in _git("ls-tree", "-r", "--name-only", f"{commit}~1", *PACKAGES).split():
        new = renamed.get(old, old)
        if old.endswith(".py") and _git("ls-tree", commit, new):
            before, after = (
                digest_of(_git("show", f"{one}").encode()) for one in (f"{commit}~1:{old}", f"{commit}:{new}")
            )
            moves[key_of(old), before] = (key_of(new), after)
    return moves, {key_of(old): key_of(new) for old, new in renamed.items()}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    moves, paths = of_commit(sys.argv[1])
    for file in sorted(Path("lab/results").glob("*.json")):
        before = file.read_text("utf-8")
        if '"sources"' in before:
            file.write_text(moved(before, moves, paths), "utf-8")
