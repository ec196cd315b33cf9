"""Which side a record is on, and what fills its gaps, is decided by that record alone."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trilemma as tl
from trilemma import data
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import Dataset, Holdings

ROWS = [[str(random.Random(i).random()), str(i % 7), "?"] for i in range(3000)]
SPLIT = [tl.split(row, test=0.3) for row in ROWS]


def test_the_share_for_testing_is_as_said_and_another_key_gives_another_split() -> None:
    assert SPLIT.count("test") / len(ROWS) == pytest.approx(0.3, abs=0.03)
    other = [tl.split(row, test=0.3, key="again") for row in ROWS]
    both = sum(one == two == "test" for one, two in zip(SPLIT, other, strict=True)) / len(ROWS)
    assert both == pytest.approx(0.09, abs=0.02)  # independent of each other
    assert {tl.split(row, test=0.0) for row in ROWS} == {"train"}
    assert {tl.split(row, test=1.0) for row in ROWS} == {"test"}


def test_who_is_for_testing_stays_so_when_more_are() -> None:
    more = [tl.split(row, test=0.5) for row in ROWS]
    assert all(later == "test" for now, later in zip(SPLIT, more, strict=True) if now == "test")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
                    lambda part: st.lists(part) | st.dictionaries(st.text(), part)))  # fmt: skip
def test_any_record_has_a_side(record: object) -> None:
    assert tl.split(record) in ("train", "test")


def test_records_that_differ_in_their_parts_only_are_different_records() -> None:
    alike = [
        ["ab", "c"],
        ["a", "bc"],
        ["abc"],
        "abc",
        b"abc",
        ["a", ["bc"]],
        {"a": "bc"},
        1,
        1.0,
        True,
        "1",
        None,
    ]
    found = {tuple(tl.split(record, 0.5, str(key)) for key in range(64)) for record in alike}
    assert len(found) == len(alike)


def test_a_row_is_on_the_side_of_its_copy_whatever_holds_it() -> None:
    row = np.arange(6, dtype=np.float32)
    for key in map(str, range(20)):
        sides = {tl.split(one, 0.5, key) for one in (row, row.copy(), torch.from_numpy(row), row[::1])}
        assert len(sides) == 1
        assert tl.split({"a": 1, "b": 2}, 0.5, key) == tl.split({"b": 2, "a": 1}, 0.5, key)
        assert tl.split(np.int64(7), 0.5, key) == tl.split(7, 0.5, key)


def test_what_is_no_record_and_no_share_is_refused() -> None:
    with pytest.raises(UserError, match="a record holds a object; allowed: text"):
        tl.split([object()])
    with pytest.raises(UserError, match="share of records for testing"):
        tl.split("a", test=1.5)


@given(st.text() | st.none() | st.floats() | st.integers() | st.binary() | st.lists(st.integers()))
def test_nothing_that_a_record_holds_makes_filling_fail(value: object) -> None:
    filled = tl.fill({"a": value, "b": value, "c": value}, {"a": 1.5, "b": 2, "c": "none known"})
    assert [type(one) for one in filled.values()] == [float, int, str]
    assert np.isfinite(filled["a"])


def test_filling_looks_at_one_column_and_its_constant() -> None:
    usual = {"age": 55.0, "stage": 0, "site": "unknown"}
    assert tl.fill({"age": "7e1", "stage": "3.0", "site": "N/A"}, usual) == {
        "age": 70.0, "stage": 3, "site": "unknown",
    }  # fmt: skip
    assert tl.fill({"age": float("nan"), "stage": "2.5"}, usual) == usual


def counted(x: torch.Tensor, rows: np.ndarray) -> Counter[float]:
    return Counter(x[rows].flatten().tolist())


@pytest.mark.parametrize("place", [0, 5, 39])
def test_a_record_that_leaves_its_place_moves_one_example_to_or_from_what_is_set_aside(place: int) -> None:
    """A split by hashes takes a record out of the middle and puts another one anywhere."""
    before = torch.arange(40.0)[:, None]
    after = torch.cat([before[:place], before[place + 1 :], torch.tensor([[99.0]])])
    sides = []
    for x in (before, after):
        own = Dataset("numbers", x, torch.zeros(40), x[:0], torch.zeros(0), None)
        held = Holdings([np.arange(40)], [], [])
        apart = data.set_aside(own, held, lambda count: count // 4, Key(3))
        sides.append((counted(x, apart.train[0]), counted(x, apart.valid[0])))
    for one, other in zip(*sides, strict=True):
        assert one.total() == other.total()
        assert (one - other).total() <= 1
