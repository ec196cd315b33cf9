"""Show the examples in docstrings as code: a griffe extension puts them between fences."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *\n|\Z).*)*", re.MULTILINE)
"""From a prompt to the next blank line."""


class DoctestFences(griffe.Extension):
    """Fence every doctest of a docstring, which Markdown would take for a quotation."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute as it is read."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    indent = found["indent"]
    return f"{indent}```pycon\n{found[0]}\n{indent}```"
