"""Tables on disk and in memory as plain columns. CSV needs nothing but this; Parquet pyarrow or pandas."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trilemma.base.errors import DataUnavailable, UserError
from trilemma.data.own.columns import MISSING
from trilemma.data.own.headings import checked, refuse_no_headings
from trilemma.data.storage import read_npz

SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")
"""The kinds of files a table may be."""

Columns = Mapping[str, Any]
"""A table: names of columns, and for each an array, or a list whose rows may be lists."""


class TextTable(dict[str, np.ndarray]):
    """The columns of a text file, which knows the line of each row."""

    def __init__(self, columns: Mapping[str, np.ndarray], file: str, lines: np.ndarray) -> None:
        super().__init__(columns)
        self.file, self.lines = file, lines


@dataclass(frozen=True)
class Share:
    """Some rows of a table, one client's for instance; `ignored` columns are neither features nor label."""

    columns: Columns
    rows: np.ndarray
    ignored: tuple[str, ...] = ()


def read_table(table: Any, names: Sequence[str] | None = None) -> Columns:
    """Return a table's columns: arrays of numbers (NaN where one is missing), or of text.

    >>> read_table({"age": [61, 47]})
    {'age': [61, 47]}
    """
    if isinstance(table, Mapping):
        return dict(zip(checked(table, "the table"), table.values(), strict=True))
    if is_frame(table):
        names = checked(table.columns, "the data frame")
        return {name: table[given].to_numpy() for name, given in zip(names, table.columns, strict=True)}
    if hasattr(table, "column_names"):  # of pyarrow, whose columns are arrays, or of Hugging Face
        arrow, names = hasattr(table, "schema"), checked(table.column_names, "the table")
        given = [table[name].to_numpy() if arrow else list(table[name]) for name in table.column_names]
        return dict(zip(names, given, strict=True))
    if not isinstance(table, str | Path):
        raise UserError(
            f"cannot read a {type(table).__name__} as a table; allowed: a data frame, a mapping of columns, "
            f"or the path of a file ({', '.join(SUFFIXES)})"
        )
    path = Path(table)
    if not path.is_file():
        raise DataUnavailable(f"there is no file {str(path)!r}")
    if path.suffix in (".csv", ".tsv"):
        return _read_csv(path, names)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".npz":
        return read_npz(path, names)
    raise UserError(f"{path.name}: unknown kind of table; allowed: {', '.join(SUFFIXES)}")


def whole(table: Any, *ignored: str) -> Share:
    """Return all rows of a table."""
    columns = read_table(table)
    return Share(columns, np.arange(len(next(iter(columns.values()), ()))), ignored)


def is_table(given: Any) -> bool:
    """Tell whether something is a table by itself: a frame, one of pyarrow, the path of a file, a share."""
    arrow = hasattr(given, "column_names") and hasattr(given, "schema")
    return isinstance(given, Share) or is_frame(given) or arrow or isinstance(given, str | Path)


def is_frame(given: Any) -> bool:
    """Tell whether something is a data frame, of pandas or of polars."""
    return hasattr(given, "columns") and hasattr(given, "to_numpy")


def _read_csv(path: Path, names: Sequence[str] | None) -> TextTable:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            rows, lines = [], []
            for row in reader:
                if row:
                    rows.append(row)
                    lines.append(reader.line_num)
    except UnicodeDecodeError:
        raise UserError(
            f"{path.name}: not UTF-8; save it as UTF-8, or read it with pandas.read_csv(…, encoding=…)"
        ) from None
    header = checked(names if names is not None else (rows.pop(0) if rows else []), path.name)
    if names is None:
        del lines[:1]
        refuse_no_headings(header, path.name)
        if len(header) == 1 and ";" in header[0]:
            raise UserError(f"{path.name}: columns are separated by ';'; write them with ',' or as .tsv")
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise UserError(
                f"{path.name}, row {number} (line {lines[number]}): {len(row)} fields, the table has "
                f"{len(header)} columns"
            )
    columns = {name: _parsed([row[i] for row in rows]) for i, name in enumerate(header)}
    return TextTable(columns, path.name, np.array(lines))


def _parsed(cells: list[str]) -> np.ndarray:
    """Read a column as integers, else as numbers, else as text.

    >>> [_parsed(cells).tolist() for cells in (["1", "2"], ["1", ".5"], ["1", "?"], ["1", "one"])]
    [[1, 2], [1.0, 0.5], [1.0, nan], ['1', 'one']]
    """
    bare = [cell.strip() for cell in cells]
    try:
        return np.array([int(cell) for cell in bare], dtype=np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([np.nan if cell in MISSING else float(cell) for cell in bare], dtype=np.float64)
    except ValueError:
        return np.array(bare, dtype=object)


def _read_parquet(path: Path) -> Columns:
    for package in ("pyarrow.parquet", "pandas"):
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        if package == "pandas":
            return read_table(module.read_parquet(path))
        return read_table(module.read_table(path))
    raise UserError(
        f"{path.name}: Parquet needs pyarrow or pandas (pip install 'trilemma[tables]'); CSV needs neither"
    )
