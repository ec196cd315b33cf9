"""How a table becomes examples: which columns are learned from, which is predicted, what lacks a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from trilemma.base.errors import UserError, nearest
from trilemma.data.own.columns import ClientExamples, Column, ColumnPlace, read_column
from trilemma.data.own.table_files import Columns, read_table

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

    def columns(self, table: Any) -> dict[str, Any]:
        """Read a table and prepare it."""
        columns = dict(read_table(table, self.names))
        return dict(self.prepare(columns)) if self.prepare else columns

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
        if self.missing == "drop":
            lacking = np.zeros(len(rows), dtype=bool)
            for name in (*labels, *features):
                lacking |= np.array([is_missing(columns[name][row]) for row in rows], dtype=bool)
            rows = rows[~lacking]
        place = ColumnPlace(who, rows)
        target = [read_column(_rows(columns[name], rows), place, name, text=True) for name in labels]
        read = {name: self._feature(columns, name, rows, place) for name in features}
        y = target[0] if isinstance(self.label, str) else _matrix(target, torch.float32)
        if all(column.single for column in read.values()):
            matrix = {"": _matrix([*read.values()], torch.float32)} if read else {}
            return ClientExamples(ColumnPlace(who, rows, features), matrix, y)
        return ClientExamples(place, read, y)

    def _feature(self, columns: Columns, name: str, rows: np.ndarray, place: ColumnPlace) -> Column:
        column = read_column(_rows(columns[name], rows), place, name, text=True)
        if isinstance(column.values, np.ndarray):
            raise UserError(
                f"{place.at(0, name)}: {str(column.values[0])[:40]!r} is text, a category: make numbers of "
                "the column first (pandas.get_dummies does), or leave it out"
            )
        return column


def is_missing(value: Any) -> bool:
    """Tell whether a value of a table is none."""
    return value is None or (isinstance(value, float | np.floating) and bool(np.isnan(value)))


def _rows(values: Any, rows: np.ndarray) -> Any:
    if isinstance(values, np.ndarray | torch.Tensor):
        return values[rows]
    return [values[row] for row in rows]


def _matrix(columns: Sequence[Column], dtype: torch.dtype) -> Column:
    return Column(torch.stack([column.dense(None, 0).to(dtype) for column in columns], dim=1))
