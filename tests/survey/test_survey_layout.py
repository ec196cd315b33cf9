"""What a record contributes to a survey: bounded whatever it is, and enough to tell what is asked."""

from __future__ import annotations

import math
from statistics import fmean, pvariance
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilemma.base.errors import UserError
from trilemma.survey.columns import SurveyColumn, written
from trilemma.survey.layout import LONGEST, Layout

COLUMNS = {
    "age": SurveyColumn(low=20, high=90, bins=7),
    "chol": SurveyColumn(edges=(100, 200, 240, 400), missing=(0,)),
    "dose": SurveyColumn(),
    "sex": SurveyColumn(values=("f", "m")),
    "stage": SurveyColumn(values=(0, 1, 2)),
}
LAYOUT = Layout(COLUMNS, correlations=True)


class Hostile(str):
    """Text that fails whenever it is looked at."""

    def strip(self, *_: Any) -> str:
        raise SystemError("no")


VALUES = st.one_of(
    st.none(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(),
    st.text(),
    st.sampled_from(["20", "90", "1e999", "-inf", "NaN", "?", "f", "0.0", Hostile("7"), b"7", [7], {"a": 1}]),
)


@given(st.lists(st.dictionaries(st.sampled_from([*COLUMNS, "other"]), VALUES), min_size=1, max_size=5))
def test_no_record_is_longer_than_the_clip_and_each_falls_into_one_cell_of_every_column(records) -> None:
    rows = LAYOUT.vectors(records).astype(np.float64)
    assert np.isfinite(rows).all()
    assert (np.linalg.norm(rows, axis=1) <= LONGEST * (1 + 1e-6)).all()
    for name, column in COLUMNS.items():
        cells = np.stack([rows @ LAYOUT.cell(name, cell) for cell in range(column.cells)])
        assert np.allclose(sorted(cells[:, 0]), [0.0] * (column.cells - 1) + [1.0], atol=1e-6)
        assert np.allclose(cells.sum(0), 1.0, atol=1e-6)


@pytest.mark.parametrize("record", [None, 7, "age", ["20"], object()])
def test_what_is_no_record_counts_as_one_that_misses_everything(record: Any) -> None:
    rows = LAYOUT.vectors([record])
    assert np.array_equal(rows, LAYOUT.vectors([{}]))


def test_the_longest_record_is_as_long_as_is_allowed() -> None:
    longest = {"age": 90, "chol": 400, "dose": 1, "sex": "f", "stage": 2}
    assert math.isclose(np.linalg.norm(LAYOUT.vectors([longest])), LONGEST, rel_tol=1e-6)


def test_sums_are_the_plain_statistics() -> None:
    draw = np.random.default_rng(3)
    ages = draw.uniform(0, 110, 200)
    records = [
        {"age": age, "chol": 3.3 * age + 50, "sex": "fm?"[row % 3], "stage": str(row % 4)}
        for row, age in enumerate(ages)
    ]
    told = LAYOUT.vectors(records).astype(np.float64).sum(0)
    cut = [(min(90.0, max(20.0, age)) - 55) / 35 for age in ages]
    assert told @ LAYOUT.records == pytest.approx(200, rel=1e-5)
    assert told @ LAYOUT.present("sex") == pytest.approx(sum(row % 3 < 2 for row in range(200)), rel=1e-5)
    assert told @ LAYOUT.cell("stage", 4) == pytest.approx(50, rel=1e-4)  # neither 0, 1 nor 2
    assert told @ LAYOUT.cell("age", 1) == pytest.approx(sum(ages < 20), rel=1e-4)
    mean, squares = told @ LAYOUT.moment("age", 1) / 200, told @ LAYOUT.moment("age", 2) / 200
    assert mean == pytest.approx(fmean(cut), abs=1e-5)
    assert squares - mean**2 == pytest.approx(pvariance(cut), abs=1e-5)
    other = [(min(400.0, max(100.0, 3.3 * age + 50)) - 250) / 150 for age in ages]
    products = told @ LAYOUT.product("age", "chol") / 200
    assert products == pytest.approx(fmean(a * b for a, b in zip(cut, other, strict=True)), abs=1e-5)


def test_a_missing_value_and_its_stand_ins_are_missing_everywhere() -> None:
    for value in (None, "", "?", "na", float("nan"), "inf", 0, "0.0", "no number"):
        cells, scaled = COLUMNS["chol"].read("chol", [{"chol": value}])
        assert (cells[0], scaled[0]) == (0, 0.0), value
    absent = LAYOUT.vectors([{"age": "?"}]).astype(np.float64)
    assert absent @ LAYOUT.moment("age", 1) == absent @ LAYOUT.moment("age", 2) == 0.0


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"low": 90, "high": 20}, "not below"),
        ({"low": 20}, "go together"),
        ({"low": 0, "high": 1, "values": [1]}, "one of"),
        ({"edges": [1, 1]}, "rise"),
        ({"edges": [1]}, "at least 2"),
        ({"values": [1, "1.0"]}, "twice"),
        ({"low": 0, "high": 1, "bins": 1}, "at least 2"),
        ({"low": 0, "high": 1, "bins": "many"}, "whole number"),
        ({"low": float("nan"), "high": 1}, "finite"),
        ({"lowest": 3}, "did you mean 'low'"),
    ],
)
def test_a_column_that_cannot_be_is_refused_in_words(said: dict[str, Any], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        SurveyColumn.parse(**said)


def test_equal_numbers_are_equal_however_they_are_written() -> None:
    assert len({written(one) for one in (1, 1.0, "1", " 1.0 ", "1e0")}) == 1
    assert written("-0.0") == written(0)
