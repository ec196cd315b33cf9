"""Rows as one tensor in a file: the same numbers wherever they lie, and nothing left behind."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from trilemma.aggregation import parse, stream
from trilemma.learning.steps.server import column_blocks
from trilemma.storage import mapped

DIM = 3 * 1024 + 5


def file_row(folder: Path, name: str, numbers: torch.Tensor, before: int = 0) -> torch.Tensor:
    """A row that begins after `before` bytes of a mapped file."""
    path = folder / name
    path.write_bytes(b"x" * before + numbers.numpy().tobytes())
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY if name == "own" else mmap.ACCESS_READ)
    return torch.from_numpy(np.frombuffer(content, "<f4", offset=before))


def rows_of_all_kinds(folder: Path) -> list[torch.Tensor | None]:
    whole = torch.randn(6, DIM, generator=torch.Generator().manual_seed(1))
    nameless = mapped.empty(folder, (DIM,), torch.float32).copy_(whole[3])
    return [
        file_row(folder, "from its beginning", whole[0]),
        file_row(folder, "from a page", whole[1], mmap.PAGESIZE),
        file_row(folder, "within a page", whole[2], 64),
        nameless,
        None,
        whole[4],
        None,
        file_row(folder, "own", whole[5]),
    ]


def expected(rows: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.stack([torch.full((DIM,), torch.nan) if row is None else row for row in rows])


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_rows_are_seen_wherever_they_lie(tmp_path: Path) -> None:
    rows = rows_of_all_kinds(tmp_path)
    own = rows[-1]
    assert own is not None
    own[7] = 5.0  # a copy of its own: what the file says is not what the row says
    stacked = mapped.stacked(tmp_path, rows, DIM)
    assert torch.equal(stacked.nan_to_num(9.0), expected(rows).nan_to_num(9.0))
    assert mapped.lies_in_a_file(stacked[1:3])
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"from its beginning", "from a page", "within a page", "own"}, "copies have no name"


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("rule", ["caf", "cwmed", "nnm+cwtm"])
def test_a_rule_sees_the_very_same_numbers(tmp_path: Path, rule: str) -> None:
    rows = rows_of_all_kinds(tmp_path)
    stacked = mapped.stacked(tmp_path, rows, DIM)
    found = stream(parse(rule, f=2), lambda: column_blocks(stacked))
    assert torch.equal(found.value, parse(rule, f=2)(expected(rows)).value)


def test_no_rows_and_no_numbers_are_rows_too(tmp_path: Path) -> None:
    assert mapped.stacked(tmp_path, [], 4).shape == (0, 4)
    assert mapped.stacked(tmp_path, [None, torch.ones(0)], 0).shape == (2, 0)
