"""The picture of the rooms in CONTRIBUTING is that of the folders; what the guided pages name is there."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest
from pages import DOCS, ROOT

PICTURE = re.search(r"```rooms\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
MOST = 22
"""Files in a folder, so that its listing can be read at a glance."""


def drawn() -> list[str]:
    """Return the folders of the picture."""
    assert PICTURE is not None
    found: list[str] = []
    above: list[str] = []
    for line in PICTURE[1].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0].rstrip("/")
        above = [*above[:depth], name]
        found.append("/".join(above))
    return found


def packages() -> list[Path]:
    """Return the folders of both packages that hold modules."""
    roots = (ROOT / "src" / "trilemma", ROOT / "lab" / "src" / "trilemma_lab")
    return sorted({file.parent for root in roots for file in root.rglob("*.py")})


def test_the_picture_shows_every_room_and_no_other() -> None:
    assert sorted(drawn()) == [one.relative_to(ROOT).as_posix() for one in packages()]


def test_every_line_of_the_picture_says_what_a_room_is() -> None:
    assert PICTURE is not None
    assert all(len(line.split(maxsplit=1)) == 2 for line in PICTURE[1].splitlines())


@pytest.mark.parametrize("room", packages(), ids=lambda room: room.relative_to(ROOT).as_posix())
def test_a_room_can_be_read_at_a_glance(room: Path) -> None:
    assert len(list(room.glob("*.py"))) <= MOST


@pytest.mark.parametrize("page", ["one-run", "one-round"])
def test_what_a_guided_page_names_is_there(page: str) -> None:
    names = re.findall(r"`(trilemma(?:\.\w+)+)`", (DOCS / "concepts" / f"{page}.md").read_text("utf-8"))
    assert len(names) > 8
    for name in names:
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            break
        for part in parts[cut:]:
            found = getattr(found, part)


def test_the_changes_of_the_table_have_a_place() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = text[text.index("## Where a change goes") : text.index("## Adding things")]
    for place in re.findall(r"`((?!lab)[\w/]+(?:/|\.py))`", table):
        assert (ROOT / "src" / "trilemma" / place).exists() or (
            ROOT / "lab" / "src" / "trilemma_lab" / "papers" / place
        ).exists(), place


def test_no_two_modules_have_a_public_class_of_one_name() -> None:
    """Not in a room, not in two, nor in the benchmarks of both."""
    names = Counter(
        node.name
        for room in (*packages(), ROOT / "benchmarks", ROOT / "lab" / "benchmarks")
        for file in room.glob("*.py")
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
