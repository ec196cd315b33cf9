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
from trilemma.data.storage import read_npz

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null")
"""What stands for a missing value in a CSV file."""

SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")
"""The kinds of files a table may be."""

Columns = Mapping[str, Any]
"""A table: names of columns, and for each an array, or a list whose rows may be lists."""


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
        return {str(name): values for name, values in table.items()}
    if _is_frame(table):
        return {str(name): table[name].to_numpy() for name in table.columns}
    if hasattr(table, "column_names"):  # of pyarrow, whose columns are arrays, or of Hugging Face
        arrow = hasattr(table, "schema")
        return {name: table[name].to_numpy() if arrow else list(table[name]) for name in table.column_names}
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
    return isinstance(given, Share) or _is_frame(given) or arrow or isinstance(given, str | Path)


def _is_frame(given: Any) -> bool:
    """Tell whether something is a data frame, of pandas or of polars."""
    return hasattr(given, "columns") and hasattr(given, "to_numpy")


def _read_csv(path: Path, names: Sequence[str] | None) -> dict[str, np.ndarray]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",") if row]
    header = list(names) if names is not None else (rows.pop(0) if rows else [])
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise UserError(f"{path.name}: two columns are called {twice!r}")
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise UserError(
                f"{path.name}, row {number}: {len(row)} fields, the table has {len(header)} columns"
            )
    return {name: _parsed([row[i] for row in rows]) for i, name in enumerate(header)}


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
        return np.array(cells, dtype=object)


def _read_parquet(path: Path) -> dict[str, Any]:
    for package in ("pyarrow.parquet", "pandas"):
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        if package == "pandas":
            return dict(read_table(module.read_parquet(path)))
        table = module.read_table(path)
        return {name: table[name].to_numpy() for name in table.column_names}
    raise UserError(
        f"{path.name}: Parquet needs pyarrow or pandas (pip install 'trilemma[tables]'); CSV needs neither"
    )
