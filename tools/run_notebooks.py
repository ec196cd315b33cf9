"""Run notebooks and keep what they show: `python tools/run_notebooks.py examples/notebooks/*.ipynb`.

Only plain Python runs here, without a kernel; an object is shown as a notebook shows it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

SHOWN = {"_repr_html_": "text/html", "_repr_markdown_": "text/markdown", "_repr_svg_": "image/svg+xml"}


def run(path: Path) -> dict[str, Any]:
    """Return the notebook with what its cells show when they are run in this order, in the current folder."""
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, 1):
        cell["execution_count"], cell["outputs"] = count, _outputs("".join(cell["source"]), names, count)
    return notebook


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(tree, f"cell {count}", "exec"), names)
        value = (
            None
            if last is None
            else eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
        )
    found: list[dict[str, Any]] = []
    if said.getvalue():
        text = said.getvalue().splitlines(True)
        found.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        shown = {"output_type": "execute_result", "execution_count": count, "metadata": {}}
        found.append({**shown, "data": _data(value)})
    return found


def _data(value: Any) -> dict[str, Any]:
    bundle = getattr(value, "_repr_mimebundle_", dict)()
    plain = {kind: getattr(value, name)() for name, kind in SHOWN.items() if hasattr(value, name)}
    return {"text/plain": repr(value), **plain, **bundle}


def main() -> None:
    """Run the notebooks that are named, each in a folder that is thrown away, and write them back."""
    paths = [Path(name).resolve() for name in sys.argv[1:]]
    for path in paths:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            found = run(path)
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{os.path.relpath(path)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
