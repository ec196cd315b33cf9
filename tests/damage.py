"""What disks, editors and enemies do to files, and commands that are called in this process to meet it."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from trilemma import cli

OTHERS = (None, True, -1, 3, 2**70, 1e400, float("nan"), "", "x", "-1", [], [[]], {}, {"x": 1}, [None, "y"])


def called(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["trilemma", *command.split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code


def values_in(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to everything in JSON values, from outside in."""
    yield path
    inside = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in inside:
        yield from values_in(value, (*path, key))


def replaced(plain: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """Return a copy in which something was changed."""
    found = here = {"": copy.deepcopy(plain)}
    way = ("", *path)
    for key in way[:-1]:
        here = here[key]
    change(here, way[-1])
    return found.get("")


def damaged_values(plain: Any, draw: Any) -> Any:
    """Return JSON values of which one is gone, or is another."""
    path = draw(st.sampled_from(list(values_in(plain))))
    if draw(st.booleans()):
        return replaced(plain, path, lambda where, key: where.pop(key))
    return replaced(plain, path, lambda where, key: where.__setitem__(key, draw(st.sampled_from(OTHERS))))


def damaged_checkpoint(path: Path, draw: Any) -> None:
    """Change something within a checkpoint that torch still reads."""
    found = torch.load(path, weights_only=True)
    name = draw(st.sampled_from(sorted(found)))
    whole = found[name]
    others = [None, 7, "x", {}, torch.zeros(2), torch.zeros(3, 1, dtype=torch.int64)]
    other = draw(st.sampled_from(others))
    if isinstance(whole, dict) and whole and draw(st.booleans()):
        found[name] = {**whole, draw(st.sampled_from(sorted(whole))): other}
    else:
        found[name] = other
    torch.save(found, path)


def damage(path: Path, draw: Any) -> None:
    """Do something to a file that a disk, an editor or an enemy might."""
    content = path.read_bytes()
    how = draw(st.sampled_from(["inside", "inside", "inside", "short", "bytes", "folder", "nested"]))
    if how == "inside" and path.suffix == ".json":
        path.write_text(json.dumps(damaged_values(json.loads(content), draw)))
    elif how == "inside" and path.suffix == ".jsonl":
        lines = content.splitlines()
        row = draw(st.integers(0, len(lines) - 1))
        lines[row] = json.dumps(damaged_values(json.loads(lines[row]), draw)).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    elif how == "inside" and path.suffix == ".toml":
        lines = content.decode().splitlines()
        row = draw(st.integers(0, len(lines) - 1))
        key = lines[row].partition("=")[0]
        lines[row] = draw(st.sampled_from(["", f"{key} = 3", f"{key} = 'x'", f"{key} = []", f"{key} = {{}}"]))
        path.write_text("\n".join(lines))
    elif how == "inside" and path.suffix == ".pt":
        damaged_checkpoint(path, draw)
    elif how == "short":
        path.write_bytes(content[: draw(st.integers(0, len(content) - 1))])
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "nested":
        path.write_bytes(b"[" * 100_000 + b"\n")
    else:
        place = draw(st.integers(0, len(content) - 1))
        path.write_bytes(content[:place] + draw(st.binary(min_size=1, max_size=4)) + content[place + 1 :])


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let the system refuse to write more into any file, as it does where a disk is full."""
    resource = pytest.importorskip("resource")
    _, most = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
