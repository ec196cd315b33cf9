"""One column of somebody's examples: read from arrays, tensors or lists, and told apart by client and row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import UserError

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null")
"""What stands for a missing value in a CSV file."""


@dataclass(frozen=True)
class ColumnPlace:
    """Where examples came from, for messages: whose they are, their rows there, the names of their columns.

    Rows are counted from 0; of a text `file` the `lines` of all its rows are known too.

    >>> ColumnPlace("client 'north'", rows=np.array([4, 7]), names=("age", "pulse")).at(1, "", (0,))
    "client 'north', row 7, column 'age'"
    """

    who: str
    rows: np.ndarray | None = None
    names: tuple[str, ...] = ()
    file: str = ""
    lines: np.ndarray | None = None

    def at(self, row: int, column: str = "", index: Sequence[int] = ()) -> str:
        """Return the place of one number: its row, its column, and its index within an example."""
        number = row if self.rows is None else int(self.rows[row])
        line = "" if self.lines is None else f" ({self.file}, line {self.lines[number]})"
        return f"{self.who}, row {number}{line}{self.column(column, index)}"

    def column(self, column: str, index: Sequence[int] = ()) -> str:
        """Return ", column …": the column's name, else its number."""
        if column:
            return f", column {column!r}" + (f"{[*index]}" if index else "")
        if not index:
            return ""
        if self.names:
            return f", column {self.names[index[0]]!r}"
        return f", column {index[0] if len(index) == 1 else tuple(index)}"

    def check_finite(self, values: Tensor, column: str) -> None:
        """Refuse NaN and infinity."""
        if not values.is_floating_point():
            return
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            row, *index = (int(number) for number in (~finite).nonzero()[0])
            raise UserError(
                f"{self.at(row, column, index)}: {float(values[row][tuple(index)])} is not a finite number; "
                "fill it in, or leave the row out"
            )


@dataclass(frozen=True)
class Column:
    """A tensor; or rows given as lists, which may differ in length; or text, for labels."""

    values: Tensor | list[Tensor] | np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    @property
    def lengths(self) -> np.ndarray | None:
        """Length of every row, where rows were given as lists."""
        return np.array([len(row) for row in self.values]) if isinstance(self.values, list) else None

    @property
    def single(self) -> bool:
        """Whether every row is a single number."""
        return isinstance(self.values, Tensor) and self.values.dim() == 1

    @property
    def vectors(self) -> bool:
        """Whether rows were given as plain lists of numbers."""
        return isinstance(self.values, list) and self.values[0].dim() == 1

    def dense(self, length: int | None, filler: int) -> Tensor:
        """Return one tensor; rows given as lists are padded, or cut, to `length`, or stacked where None.

        >>> Column([torch.tensor([1, 2, 3]), torch.tensor([4])]).dense(2, filler=0)
        tensor([[1, 2],
                [4, 0]])
        """
        if isinstance(self.values, Tensor):
            return self.values
        assert isinstance(self.values, list)
        if length is None:
            return torch.stack(self.values)
        like = self.values[0]
        padded = like.new_full((len(self.values), length, *like.shape[1:]), filler)
        for row, given in zip(padded, self.values, strict=True):
            row[: len(given)] = given[:length]
        return padded


@dataclass(frozen=True)
class ClientExamples:
    """One client's examples as they were given: columns (a single one has the empty name) and targets."""

    place: ColumnPlace
    x: Mapping[str, Column]
    y: Column

    def __len__(self) -> int:
        return len(self.y)


def read_column(values: Any, place: ColumnPlace, column: str, *, text: bool = False) -> Column:
    """Read a column: floats become float32, integers int64, booleans stay; anything else is refused.

    `text`: leave text as it is, for labels that have names.
    """
    if isinstance(values, tuple) and text:  # targets of several columns, as (time, event)
        parts = [read_column(part, place, column).dense(None, 0).float() for part in values]
        if len({part.shape for part in parts}) > 1:
            raise UserError(f"{place.who}: targets of {[len(part) for part in parts]} rows; all need as many")
        return Column(torch.stack(parts, dim=1))
    if isinstance(values, Tensor):
        return Column(_number_type(values.detach().cpu(), place, column))
    if isinstance(values, Mapping) or not (isinstance(values, Sequence) or hasattr(values, "__array__")):
        raise UserError(
            f"{place.who}{place.column(column)}: cannot read a {type(values).__name__}; allowed: an array, "
            "a tensor or a list"
        )
    if isinstance(values, str):
        _no_number(values, place, 0, column)
    array = values if isinstance(values, Sequence) else np.asarray(values)
    if isinstance(array, Sequence) or array.dtype == object:
        if any(_is_row(row) for row in array):
            return Column(_alike([_row(row, place, number, column) for number, row in enumerate(array)]))
        array = _scalars(array, place, column, text)
    if array.dtype.kind in "USO":
        if not text:
            _no_number(array.reshape(-1)[0], place, 0, column)
        return Column(array.astype(object))
    if array.dtype.kind not in "biuf":
        raise UserError(f"{place.who}{place.column(column)}: cannot read numbers of type {array.dtype}")
    return Column(_number_type(torch.from_numpy(np.array(array, order="C")), place, column))


def numbers_in(cells: np.ndarray, where: Callable[[int], str], if_text: str) -> Tensor:
    """Read cells of text as numbers; refuse the first that is none, by `if_text` where most are none.

    >>> numbers_in(np.array(["1.5", "1,5"]), "row {}:".format, "is text")
    Traceback (most recent call last):
    trilemma.base.errors.UserError: row 1: '1,5' is not a number; write it with a point, 1.5
    """
    found = [_as_number(cell) for cell in cells]
    odd = [row for row, number in enumerate(found) if number is None]
    if not odd:
        return torch.tensor([number or 0.0 for number in found])
    cell, cure = str(cells[odd[0]]), if_text
    if _as_number(cell.replace(",", ".", 1)) is not None:
        cure = f"is not a number; write it with a point, {cell.replace(',', '.', 1).strip()}"
    elif 2 * len(odd) < len(found):
        cure = "is not a number; correct it, leave the row out, or leave the cell empty (a missing value)"
    raise UserError(f"{where(odd[0])} {cell[:40]!r} {cure}")


def _as_number(cell: Any) -> float | None:
    """Return a cell's number, NaN if it stands for a missing value; None: it is neither."""
    if str(cell).strip() in MISSING:
        return math.nan
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _is_row(value: Any) -> bool:
    return not isinstance(value, str) and (isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0)


def _row(value: Any, place: ColumnPlace, number: int, column: str) -> Tensor:
    """Read one row that is a list or an array."""
    if isinstance(value, Tensor):
        return _number_type(value.detach().cpu(), place, column)
    try:
        array = np.asarray(value)
        if array.size == 0:
            array = array.astype(np.int64)
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            raise ValueError
    except ValueError:
        _no_number(value, place, number, column)
    return _number_type(torch.from_numpy(array.copy()), place, column)


def _alike(rows: list[Tensor]) -> list[Tensor]:
    """Return rows of one type; empty ones have none of their own."""
    types = {row.dtype for row in rows if len(row)}
    common = torch.float32 if torch.float32 in types else next(iter(types), torch.int64)
    inner = next((row.shape[1:] for row in rows if len(row)), torch.Size())
    return [row.to(common) if len(row) else torch.empty((0, *inner), dtype=common) for row in rows]


def _scalars(values: Any, place: ColumnPlace, column: str, text: bool) -> np.ndarray:
    """Return a list of single values as an array, or say which of them is no number."""
    numbers = [value.item() if isinstance(value, Tensor | np.generic) else value for value in values]
    if text and numbers and all(isinstance(value, str) for value in numbers):
        return np.array(numbers, dtype=object)
    for row, value in enumerate(numbers):
        if not isinstance(value, bool | int | float):
            _no_number(value, place, row, column)
    return np.array(numbers) if numbers else np.empty(0, dtype=np.int64)


def _number_type(values: Tensor, place: ColumnPlace, column: str) -> Tensor:
    if values.is_floating_point():
        return values.to(torch.float32)
    if values.is_complex():
        raise UserError(f"{place.who}{place.column(column)}: complex numbers; allowed: real ones, integers")
    return values if values.dtype == torch.bool else values.to(torch.int64)


def _no_number(value: Any, place: ColumnPlace, row: int, column: str) -> NoReturn:
    shown = repr(value.item() if isinstance(value, np.generic) else value)
    raise UserError(
        f"{place.at(row, column)}: {shown[:40]}{'…' if len(shown) > 40 else ''} is not a number"
        + ("; name the classes, in order, with classes" if column == "the label" else "")
    )
