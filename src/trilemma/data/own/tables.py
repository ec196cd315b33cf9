"""Tables as clients' data: CSV, Parquet, npz, data frames; with a client column, or in a folder per client.

Rows are counted from 0, without the header. What is public: see `trilemma.data.own`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trilemma.base.errors import DataUnavailable, UserError, nearest
from trilemma.data.own.clients import assemble, read_examples
from trilemma.data.own.columns import ClientExamples, ColumnPlace
from trilemma.data.own.reading import Prepare, Reading, is_missing
from trilemma.data.own.table_files import SUFFIXES, Columns, Share, read_table
from trilemma.data.own.targets import Target, Targets
from trilemma.data.types import Dataset


def from_table(
    table: Any,
    *,
    client: str,
    label: str | Sequence[str],
    features: Sequence[str] | None = None,
    test: Any = None,
    names: Sequence[str] | None = None,
    prepare: Prepare | None = None,
    missing: Literal["refuse", "drop"] = "refuse",
    target: Target | None = None,
    classes: int | Sequence[Any] | None = None,
    length: int | None = None,
    name: str = "table",
) -> Dataset:
    """Return the data set of a table in which one column says whose row it is.

    Args:
        table: A data frame, a mapping of columns, or the path of a CSV, TSV, Parquet or npz file.
        client: The column that says whose row it is; clients are numbered in the order of its values.
        label: The column to predict, or several that are predicted together, as in ["time", "event"].
        features: The columns to learn from. Default: all but the client's and the label's.
        test: Test examples, a table like `table`: for everyone, or for each client if it has their column.
        names: The columns of a CSV file without a header.
        prepare: A function from the columns just read, a dict, to those to use: the place to encode
            categories, to tokenise text, and to scale by public constants.
        missing: What to do with rows that lack a value: refuse the table, or drop them.
        target: What the targets are, as in `from_clients`.
        classes: Number of classes, or their names in order (public).
        length: What columns of varying length are padded, or cut, to (public).
        name: What the data set is called in reports.

    >>> rows = {"site": ["b", "a", "b"], "age": [61, 47, 38], "ill": [1, 0, 1]}
    >>> own = from_table(rows, client="site", label="ill")
    >>> [own.x_train[held].flatten().tolist() for held in own.natural.train]
    [[47.0], [61.0, 38.0]]
    """
    reading = _reading(label, features, names, prepare, missing)
    columns = reading.columns(table)
    groups = _groups(columns, client)
    train = [reading.examples(columns, f"client {who!r}", rows, (client,)) for who, rows in groups.items()]
    tests, own_tests = [], False
    if test is not None:
        tested = reading.columns(test)
        own_tests = client in tested
        if own_tests:
            found = _groups(tested, client)
            strangers = [who for who in found if who not in groups]
            if strangers:
                raise UserError(f"client {strangers[0]!r} has test examples only; every client must train")
            parts = {f"client {who!r}'s test data": found.get(who, _no_rows()) for who in groups}
        else:
            parts = {"the test data": np.arange(_count(tested))}
        tests = [reading.examples(tested, who, rows, (client,)) for who, rows in parts.items()]
    return assemble(train, tests, own_tests, Targets(target, classes), length, name)


def by_client(table: Any, client: str) -> dict[Any, Share]:
    """Return every client's rows of a table in which one column says whose row it is.

    >>> [*by_client({"site": ["b", "a", "b"], "age": [61, 47, 38]}, "site")]
    ['a', 'b']
    """
    columns = read_table(table)
    return {owner: Share(columns, rows, (client,)) for owner, rows in _groups(columns, client).items()}


def from_folder(
    folder: str | Path,
    *,
    label: str | Sequence[str] = "y",
    features: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    prepare: Prepare | None = None,
    missing: Literal["refuse", "drop"] = "refuse",
    target: Target | None = None,
    classes: int | Sequence[Any] | None = None,
    length: int | None = None,
    name: str | None = None,
) -> Dataset:
    """Return the data set of a folder that holds a folder, or a file, for each client.

    Clients are numbered in the order of their names, client-2 before client-10. A client's folder holds one
    table and, where clients have test examples of their own, a second called `test`. A table called `test`
    beside the clients is for everyone. Tables are CSV, TSV, Parquet or npz; an npz with the arrays `x` and
    `y` is taken as it is. Options are those of `from_table`.
    """
    reading = _reading(label, features, names, prepare, missing)
    folder = Path(folder)
    if not folder.is_dir():
        raise DataUnavailable(f"there is no folder {str(folder)!r}")
    inside = sorted(folder.iterdir(), key=lambda path: _natural(path.name))
    clients = [path for path in inside if path.is_dir()]
    common = [path for path in inside if path.suffix in SUFFIXES and path.stem == "test"]
    if not clients:
        clients = [path for path in inside if path.suffix in SUFFIXES and path.stem != "test"]
    if not clients:
        raise DataUnavailable(
            f"{str(folder)!r} holds no clients; allowed: a folder for each, or a file ({', '.join(SUFFIXES)})"
        )
    train, tests = [], []
    for path in clients:
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in SUFFIXES]
        own = [file for file in files if file.stem != "test"]
        if len(own) != 1:
            raise DataUnavailable(
                f"{str(path)!r} holds {len(own)} tables; allowed: one, and another called test"
            )
        who = f"client {path.stem!r}"
        train.append(_read_file(own[0], who, reading))
        tests += [_read_file(file, f"{who}'s test data", reading) for file in files if file not in own]
    if len(tests) not in (0, len(train)):
        raise UserError(f"{len(tests)} of {len(train)} clients have test examples; all must, or none")
    own_tests = bool(tests)
    if common and not own_tests:
        tests = [_read_file(common[0], "the test data", reading)]
    return assemble(train, tests, own_tests, Targets(target, classes), length, name or folder.resolve().name)


def _read_file(path: Path, who: str, reading: Reading) -> ClientExamples:
    if path.suffix == ".npz":
        arrays = read_table(path)
        if reading.prepare is None and {*arrays} == {"x", "y"}:
            return read_examples((arrays["x"], arrays["y"]), ColumnPlace(who))
    columns = reading.columns(path)
    return reading.examples(columns, who, np.arange(_count(columns)))


def _reading(
    label: str | Sequence[str],
    features: Sequence[str] | None,
    names: Sequence[str] | None,
    prepare: Prepare | None,
    missing: Literal["refuse", "drop"],
) -> Reading:
    if missing not in ("refuse", "drop"):
        raise UserError(f"missing = {missing!r}; allowed: refuse, drop")
    labels = label if isinstance(label, str) else tuple(label)
    return Reading(
        labels, tuple(features) if features else None, tuple(names) if names else None, prepare, missing
    )


def _groups(columns: Columns, client: str) -> dict[Any, np.ndarray]:
    """Return every client's rows, clients in the order of their names."""
    if client not in columns:
        raise UserError(f"no column {client!r} that says whose row it is: {nearest(client, columns)}")
    owners = [value.item() if isinstance(value, np.generic) else value for value in columns[client]]
    for row, owner in enumerate(owners):
        if is_missing(owner):
            raise UserError(f"row {row}, column {client!r}: it is not said whose row it is")
    places: dict[Any, list[int]] = {}
    for row, owner in enumerate(owners):
        places.setdefault(owner, []).append(row)
    return {owner: np.array(places[owner]) for owner in sorted(places, key=lambda own: _natural(str(own)))}


def _count(columns: Columns) -> int:
    return len(next(iter(columns.values()))) if columns else 0


def _no_rows() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


def _natural(name: str) -> list[tuple[int, float, str]]:
    """Return what sorts client-2 before client-10.

    >>> sorted(["client-10", "client-2", "b", "3"], key=_natural)
    ['3', 'b', 'client-2', 'client-10']
    """
    parts = re.split(r"(\d+)", name)
    return [(0, float(part), "") if part.isdigit() else (1, 0.0, part) for part in parts if part]
