"""How a table becomes examples: which columns are learned from, which is predicted, what lacks a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from trilemma.base.errors import UserError, nearest
from trilemma.data.own.columns import MISSING, ClientExamples, Column, ColumnPlace, numbers_in, read_column
from trilemma.data.own.headings import refuse_index
from trilemma.data.own.table_files import Columns, TextTable, read_table

Prepare = Callable[[dict[str, Any]], Columns]
"""A user's own step on a table just read: add, change and remove columns."""


@dataclass(frozen=True)
class Reading:
    """How a table becomes examples.

    `label` is a column, or several that are predicted together; `features` are the columns to learn from
    (None: all the others); `names` are a CSV file's columns where it has no header; `missing` says what
    happens to rows that lack a value.
    """

    label: str | tuple[str, ...]
    features: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None
    prepare: Prepare | None = None
    missing: Literal["refuse", "drop"] = "refuse"

    def columns(self, table: Any) -> Columns:
        """Read a table and prepare it."""
        columns = read_table(table, self.names)
        return read_table(self.prepare(dict(columns))) if self.prepare else columns

    def examples(
        self, columns: Columns, who: str, rows: np.ndarray, ignored: Sequence[str] = ()
    ) -> ClientExamples:
        """Return the examples in some rows of a table; `ignored` columns are no features.

        Columns of single numbers become one matrix. Where a column has several numbers in a row, every
        column keeps its name.
        """
        labels = (self.label,) if isinstance(self.label, str) else self.label
        features = self.features or tuple(
            name for name in columns if name not in labels and name not in ignored
        )
        for name in (*labels, *features):
            if name not in columns:
                raise UserError(f"{who}: no column {name!r}: {nearest(name, columns)}")
        if self.features is None:
            refuse_index(features, who)
        if self.missing == "drop":
            lacking = np.zeros(len(rows), dtype=bool)
            for name in (*labels, *features):
                lacking |= np.array([is_missing(columns[name][row]) for row in rows], dtype=bool)
            rows = rows[~lacking]
        place = place_of(columns, who, rows)
        target = [read_column(_rows(columns[name], rows), place, name, text=True) for name in labels]
        y = target[0] if isinstance(self.label, str) else _matrix(target, torch.float32)
        return ClientExamples(*read_features(columns, features, place), y)


def place_of(columns: Columns, who: str, rows: np.ndarray) -> ColumnPlace:
    """Return the place of some rows of a table, with their lines if it comes from a text file."""
    if isinstance(columns, TextTable):
        return ColumnPlace(who, rows, (), columns.file, columns.lines)
    return ColumnPlace(who, rows)


def read_features(
    columns: Columns, names: Sequence[str], place: ColumnPlace
) -> tuple[ColumnPlace, dict[str, Column]]:
    """Return some columns in the place's rows: one matrix, with its names, where all are single numbers."""
    assert place.rows is not None
    read = {name: _feature(_rows(columns[name], place.rows), place, name) for name in names}
    if read and all(column.single for column in read.values()):
        return replace(place, names=tuple(names)), {"": _matrix([*read.values()], torch.float32)}
    return place, read


def _feature(values: Any, place: ColumnPlace, name: str) -> Column:
    column = read_column(values, place, name, text=True)
    if not isinstance(column.values, np.ndarray):
        return column
    cure = "is text, a category: make numbers of the column first (pandas.get_dummies does), or leave it out"
    return Column(numbers_in(column.values, lambda row: f"{place.at(row, name)}:", cure))


def is_missing(value: Any) -> bool:
    """Tell whether a value of a table is none."""
    if isinstance(value, str):
        return value.strip() in MISSING
    return value is None or (isinstance(value, float | np.floating) and bool(np.isnan(value)))


def _rows(values: Any, rows: np.ndarray) -> Any:
    if isinstance(values, np.ndarray | torch.Tensor):
        return values[rows]
    return [values[row] for row in rows]


def _matrix(columns: Sequence[Column], dtype: torch.dtype) -> Column:
    return Column(torch.stack([column.dense(None, 0).to(dtype) for column in columns], dim=1))
