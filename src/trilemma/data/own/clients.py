"""Your own data: what each client has becomes one `Dataset` that knows its clients, checked on the way.

A client's examples are one of

* `(x, y)`: arrays, tensors or lists; `x` may be a mapping of names to them;
* a torch `Dataset` whose items are `(x, y)`, or mappings with a label among them;
* a `DataLoader` with torch's own collation, of which the data set is taken: batches are ours to draw;
* a table: a data frame of pandas or polars, a table of pyarrow, the path of a CSV, TSV or Parquet file, with
  a label among its columns. Columns of single numbers become one matrix;
* a mapping of columns, as Hugging Face data sets have them, with a label among them. Columns whose rows
  differ in length are padded with 0, and a mask column says what is real.

Targets are class labels (integers), several yes-or-no labels at once (a matrix of booleans, or of integers
where examples are no sequences), token labels (integers, one per token), or any other numbers: a
regression's, or several columns such as (time, event).

What is public. A run reveals the number of clients, columns and classes, the padded length, and the number of
examples of the poorest client (the amount of noise depends on it). In a simulation `classes` and `length`
may be read off the data; in a federation nobody sees all of it, so every party states the same ones. Scale
features by constants that are known without the data (the range of an instrument, not this client's mean):
what is computed from records and shapes the model is a release of its own, and no ε here covers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import UserError, nearest
from trilemma.data.own.columns import ClientExamples, Column, ColumnPlace, read_column
from trilemma.data.own.headings import alike, refuse_index
from trilemma.data.own.reading import Reading, read_features
from trilemma.data.own.table_files import Share, is_frame, is_table, whole
from trilemma.data.own.targets import Target, Targets
from trilemma.data.types import Dataset, Features, Holdings

MASK = "attention_mask"
"""The mask added beside padded columns; where columns differ in length, others are called NAME_mask."""

LABELS = ("label", "labels", "y", "target")
"""Names a label column may have without being pointed out."""


def from_clients(
    clients: Sequence[Any] | Mapping[Any, Any],
    test: Any = None,
    *,
    label: str | None = None,
    target: Target | None = None,
    classes: int | Sequence[Any] | None = None,
    length: int | None = None,
    name: str = "own",
    columns: Sequence[str] = (),
) -> Dataset:
    """Return the data set whose client i holds the i-th of `clients`: use it with its `natural` holdings.

    Args:
        clients: A list of clients, or a mapping of their names to them; see the module for what one may be.
        test: Test examples for everyone, given like one client's; or a list or mapping, one for each client.
        label: The label's column, where a client is a mapping of columns. Default: the one called label,
            labels, y or target.
        target: What the targets are. Default: integers are classes; several integers for one example are
            tokens' classes where examples are sequences, else multi-label, as booleans are; everything else
            are values.
        classes: Number of classes, or their names in order (public). Default: one more than the largest.
        length: What columns of varying length are padded, or cut, to (public). Default: the longest row.
        name: What the data set is called in reports.
        columns: The names of a table's columns, in the order in which a model sees them. Default: the first
            client's order. Everybody's tables must have these columns, in any order.

    >>> x, y = np.zeros((5, 3)), np.array([0, 1, 2, 0, 1])
    >>> own = from_clients({"north": (x, y), "south": (x[:2], y[:2])}, test=(x, y))
    >>> own.classes, own.x_train.dtype, [len(rows) for rows in own.natural.train]
    (3, torch.float32, [5, 2])
    >>> from_clients([(x, y), (x * np.nan, y)])
    Traceback (most recent call last):
    trilemma.base.errors.UserError: client 1, row 0, column 0: nan is not a finite number; ...
    """
    named = dict(clients) if isinstance(clients, Mapping) else dict(enumerate(clients))
    train = [read_examples(given, ColumnPlace(_who(client)), label) for client, given in named.items()]
    own_tests = _per_client(test)
    if own_tests is None:
        tests = [] if test is None else [read_examples(test, ColumnPlace("the test data"), label)]
    else:
        _same_clients(named, own_tests)
        tests = [
            read_examples(own_tests[client], ColumnPlace(f"{_who(client)}'s test data"), label)
            for client in named
        ]
    return assemble(train, tests, own_tests is not None, Targets(target, classes), length, name, columns)


def assemble(
    train: Sequence[ClientExamples],
    tests: Sequence[ClientExamples],
    own_tests: bool,
    targets: Targets,
    length: int | None,
    name: str,
    columns: Sequence[str] = (),
) -> Dataset:
    """Check all examples, pad what varies, and lay the clients end to end.

    `tests` are one for each client if `own_tests`, else none or one for everybody.
    """
    if not train:
        raise UserError("there are no clients; at least one is needed")
    for given in train:
        if not len(given):
            raise UserError(f"{given.place.who} holds no examples; every client needs at least one")
    everyone, names = alike([*train, *(given for given in tests if len(given))], columns)
    for given in everyone:
        _check_columns(given, everyone[0])
    padding = _padding(everyone, length)
    x = [_features(given, padding) for given in everyone]
    for given, own in zip(everyone, x, strict=True):
        _check_values(given, own, x[0], train[0])
    if targets.kind is None and targets.classes is None:
        _check_targets(train)
    targets = targets.settled(
        train[0].y, sequences=bool(padding.lengths) or any(map(_sequences, x[0].values()))
    )
    y, classes = targets.read([(given.place, given.y) for given in everyone], length)

    def joined(parts: slice) -> tuple[Features, Tensor]:
        if not x[parts]:
            nothing = {column: values[:0] for column, values in x[0].items()}
            return _bare(nothing), y[0][:0]
        columns = {column: torch.cat([own[column] for own in x[parts]]) for column in x[0]}
        return _bare(columns), torch.cat(y[parts])

    learned, tested = joined(slice(len(train))), joined(slice(len(train), None))
    holdings = Holdings(_end_to_end(train), [], _end_to_end(tests) if own_tests else [])
    description = f"{len(train)} clients, {len(learned[1]):,}/{len(tested[1]):,} examples"
    return Dataset(
        name,
        *learned,
        *tested,
        classes=classes,
        description=description,
        natural=holdings,
        multilabel=targets.kind == "multi-label",
        names=names,
    )


def read_examples(given: Any, place: ColumnPlace, label: str | None = None) -> ClientExamples:
    """Read one client's examples, in any of the forms the module names."""
    if is_table(given):
        share = given if isinstance(given, Share) else whole(given)
        return Reading(_label(share.columns, place, label)).examples(
            share.columns, place.who, share.rows, share.ignored
        )
    if isinstance(given, torch.utils.data.DataLoader):
        if given.collate_fn is not torch.utils.data.default_collate:
            raise UserError(
                f"{place.who}: a DataLoader that collates in its own way; give its data set, whose items are "
                "(x, y) or mappings of columns"
            )
        return read_examples(given.dataset, place, label)
    if isinstance(given, tuple) and len(given) == 2:
        x, y = given
    elif type(given) is torch.utils.data.TensorDataset and len(given.tensors) == 2:
        x, y = given.tensors
    elif isinstance(given, Mapping):
        x, y = _without_label(given, place, label)
    elif hasattr(given, "column_names"):  # a Hugging Face data set
        x, y = _without_label({name: list(given[name]) for name in given.column_names}, place, label)
    elif isinstance(given, torch.utils.data.Dataset):
        x, y = _from_items(list(_items(given)), place, label)
    else:
        raise UserError(
            f"{place.who}: cannot read a {type(given).__name__}; allowed: (x, y), a torch Dataset or "
            "DataLoader, a data frame, the path of a table, or a mapping of columns"
        )
    if is_frame(x):
        return _from_frame(x, y, place)
    columns = x if isinstance(x, Mapping) else {"": x}
    read = {str(name): read_column(values, place, str(name)) for name, values in columns.items()}
    target = read_column(y, place, "the label", text=True)
    for name, column in read.items():
        if len(column) != len(target):
            raise UserError(
                f"{place.who}: {len(column)} rows{place.column(name)}, but {len(target)} labels; "
                "every example needs one"
            )
    if not read:
        raise UserError(f"{place.who} has labels, but no features")
    return ClientExamples(place, read, target)


def _from_frame(x: Any, y: Any, place: ColumnPlace) -> ClientExamples:
    """Read features that are a data frame, whose columns have names, and targets beside it."""
    share, target = whole(x), read_column(y, place, "the label", text=True)
    if len(share.rows) != len(target):
        raise UserError(
            f"{place.who}: {len(share.rows)} rows, but {len(target)} labels; every example needs one"
        )
    if hasattr(x, "index") and hasattr(y, "index") and not callable(y.index) and not x.index.equals(y.index):
        raise UserError(
            f"{place.who}: the rows of x and of y have other indexes, so they may not belong together; give "
            "y.loc[x.index], or reset both indexes if they do"
        )
    names = tuple(share.columns)
    refuse_index(names, place.who)
    return ClientExamples(*read_features(share.columns, names, replace(place, rows=share.rows)), target)


def _without_label(
    columns: Mapping[str, Any], place: ColumnPlace, label: str | None
) -> tuple[Mapping[str, Any], Any]:
    chosen = _label(columns, place, label)
    return {name: values for name, values in columns.items() if name != chosen}, columns[chosen]


def _label(columns: Mapping[str, Any], place: ColumnPlace, label: str | None) -> str:
    """Return which column is the label's."""
    names = [label] if label is not None else [name for name in LABELS if name in columns]
    if len(names) != 1 or names[0] not in columns:
        wanted = (
            f"no column {label!r}" if label is not None else f"{len(names)} columns that may be the label"
        )
        raise UserError(f"{place.who}: {wanted}; say which with label; {nearest(label or 'label', columns)}")
    return names[0]


def _items(given: torch.utils.data.Dataset[Any]) -> Iterator[Any]:
    if isinstance(given, torch.utils.data.IterableDataset):
        return iter(given)
    return (given[index] for index in range(len(cast(Any, given))))


def _from_items(items: list[Any], place: ColumnPlace, label: str | None) -> tuple[Any, Any]:
    """Turn a list of examples into columns."""
    for row, item in enumerate(items):
        if type(item) is not type(items[0]) or not (
            isinstance(item, Mapping) or (isinstance(item, tuple) and len(item) == 2)
        ):
            raise UserError(
                f"{place.at(row)}: the data set gives a {type(item).__name__}; allowed: (x, y), or a mapping "
                "of columns, the same for every row"
            )
    if items and isinstance(items[0], Mapping):
        return _without_label(_collected(items, place), place, label)
    x, y = [item[0] for item in items], [item[1] for item in items]
    return (_collected(x, place) if x and isinstance(x[0], Mapping) else x), y


def _collected(rows: Sequence[Mapping[str, Any]], place: ColumnPlace) -> dict[str, list[Any]]:
    for number, row in enumerate(rows):
        if set(row) != set(rows[0]):
            raise UserError(f"{place.at(number)}: columns {sorted(row)}, row 0 has {sorted(rows[0])}")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _per_client(test: Any) -> dict[Any, Any] | None:
    """Return the clients' own test examples, or None where `test` is for everyone."""
    if isinstance(test, list):
        return dict(enumerate(test))
    if isinstance(test, Mapping) and all(
        isinstance(given, tuple | Mapping | torch.utils.data.Dataset | torch.utils.data.DataLoader)
        or hasattr(given, "column_names")
        or is_table(given)
        for given in test.values()
    ):
        return dict(test)
    return None


def _same_clients(clients: Mapping[Any, Any], tests: Mapping[Any, Any]) -> None:
    if set(clients) != set(tests):
        odd = next(iter(set(clients) ^ set(tests)))
        missing = "has no test data" if odd in clients else "has test data only"
        raise UserError(f"{_who(odd)} {missing}; give test data for every client, or one set for everyone")


def _check_columns(given: ClientExamples, first: ClientExamples) -> None:
    if set(given.x) != set(first.x):
        raise UserError(
            f"{given.place.who} has {_columns(given.x)}, {first.place.who} has {_columns(first.x)}; "
            "all must have the same"
        )


def _check_values(
    given: ClientExamples, own: Mapping[str, Tensor], reference: Mapping[str, Tensor], first: ClientExamples
) -> None:
    """Refuse widths and types other than the first client's, and NaN or infinite numbers."""
    for column, values in own.items():
        like, where = reference[column], given.place.column(column)
        if values.shape[1:] != like.shape[1:]:
            raise UserError(
                f"{given.place.who}{where}: examples of shape {tuple(values.shape[1:])}, "
                f"{first.place.who} has {tuple(like.shape[1:])}; all must be alike"
            )
        if values.dtype != like.dtype:
            raise UserError(
                f"{given.place.who}{where}: {_type(values)}, {first.place.who} has {_type(like)}; "
                "all must be alike"
            )
        given.place.check_finite(values, column)


def _check_targets(train: Sequence[ClientExamples]) -> None:
    """Refuse whole targets beside others: the first client would decide whether they are classes."""
    floats = isinstance(first := train[0].y.values, Tensor) and first.is_floating_point()
    for given in train[1:]:
        values = given.y.values
        if floats and isinstance(values, Tensor) and values.dtype == torch.int64:
            raise UserError(
                f"{given.place.who} has whole numbers as targets, as classes are, {train[0].place.who} has "
                "others: say target = 'classes' or target = 'values'"
            )


@dataclass(frozen=True)
class _Padding:
    """What columns given as lists are padded to, and the masks to be added, each with its column."""

    lengths: Mapping[str, int]
    masks: Mapping[str, str]


def _padding(everyone: Sequence[ClientExamples], length: int | None) -> _Padding:
    """Find the columns whose rows differ in length; those with the same lengths share one mask."""
    lengths: dict[str, int] = {}
    alike: dict[bytes, list[str]] = {}
    for column in everyone[0].x:
        found = [given.x[column].lengths for given in everyone]
        known = np.concatenate([own for own in found if own is not None] or [np.zeros(0, np.int64)])
        differ = len(set(known.tolist())) > 1
        if differ and len(known) < sum(len(given) for given in everyone):
            given = next(given for given, own in zip(everyone, found, strict=True) if own is None)
            raise UserError(
                f"{given.place.who}{given.place.column(column)}: rows of one length, others have lists of "
                "several; give lists everywhere"
            )
        if differ or (len(known) and length is not None and everyone[0].x[column].vectors):
            lengths[column] = length or int(known.max())
            alike.setdefault(known.tobytes(), []).append(column)
    masks: dict[str, str] = {}
    for columns in alike.values():
        if not any(column.endswith("mask") for column in columns):
            taken = MASK in everyone[0].x or MASK in masks
            masks[f"{columns[0] or 'x'}_mask" if taken else MASK] = columns[0]
    return _Padding(lengths, masks)


def _features(given: ClientExamples, padding: _Padding) -> dict[str, Tensor]:
    name = {"": "x"} if padding.masks else {}
    dense = {
        name.get(column, column): values.dense(padding.lengths.get(column), 0)
        for column, values in given.x.items()
    }
    masks = {
        mask: (
            torch.arange(padding.lengths[column]) < torch.from_numpy(given.x[column].lengths)[:, None]
        ).long()
        for mask, column in padding.masks.items()
    }
    return {**dense, **masks}


def _sequences(column: Tensor) -> bool:
    """Whether examples are sequences: of token numbers (n, t), or of vectors (n, t, d)."""
    return column.dim() == 3 or (column.dim() == 2 and column.dtype == torch.int64)


def _bare(columns: dict[str, Tensor]) -> Features:
    return columns[""] if [*columns] == [""] else columns


def _end_to_end(pieces: Sequence[ClientExamples]) -> list[np.ndarray]:
    ends = np.cumsum([len(piece) for piece in pieces])
    return [np.arange(end - len(piece), end) for piece, end in zip(pieces, ends, strict=True)]


def _who(client: Any) -> str:
    return f"client {client}" if isinstance(client, int) else f"client {client!r}"


def _columns(columns: Mapping[str, Column]) -> str:
    return ", ".join(repr(name) for name in columns) if "" not in columns else "a single tensor"


def _type(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")
