"""A client's records as far as they are what a declaration says: what is outside counts as zero.

Whether a client takes part must not depend on a record. So at a node nothing is refused for what a record is:
it is left out of training (`Dataset.left_out`), and its place stays its own. At home `trilemma check` and
`allow` say which these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.data.own.declared import Declaration, Values, made_up
from trilemma.data.own.table_files import Share, is_table, whole
from trilemma.data.types import IGNORED, Dataset, Holdings, columns_of, each


def stand_in(declaration: Declaration, count: int, key: Key) -> Dataset:
    """Return made-up training examples of one client.

    >>> stand_in(Declaration(Values(shape=(3,)), Values("whole", high=1)), 5, Key(1)).x_train.shape
    torch.Size([5, 3])
    """
    x, y = made_up(declaration, count, key)
    return Dataset(
        *("made up", x, y, each(x, lambda column: column[:0]), y[:0], declaration.classes),
        natural=Holdings([np.arange(count)], [], []),
        multilabel=declaration.y.kind == "yes-no",
    )


def outside(declaration: Declaration, dataset: Dataset) -> Tensor:
    """Tell which training examples are not what the declaration says, (n,).

    >>> x, y = torch.tensor([[0.5], [2.0], [0.1]]), torch.tensor([0, 1, 3])
    >>> unit = Declaration(Values(shape=(1,), low=0, high=1), Values("whole", high=2))
    >>> outside(unit, Dataset("three", x, y, x, y, classes=4))
    tensor([False,  True,  True])
    """
    columns, y = columns_of(dataset.x_train), dataset.y_train
    if not _alike(declaration, dataset):
        return torch.ones(len(y), dtype=torch.bool)
    found = [_outside(values, columns[name], 0) for name, values in declaration.columns.items()]
    filler = IGNORED if declaration.ignored else None
    return torch.stack([*found, _outside(_target(declaration), y, filler)]).any(0)


def _target(declaration: Declaration) -> Values:
    """Return what targets are, as a data set has them: several labels at once are numbers there."""
    y = declaration.y
    return replace(y, kind="numbers", low=0, high=1) if y.kind == "yes-no" else y


def _alike(declaration: Declaration, dataset: Dataset) -> bool:
    """Tell whether columns, types and shapes are the declared ones."""
    wanted = {**declaration.columns, "the target": _target(declaration)}
    found = {**columns_of(dataset.x_train), "the target": dataset.y_train}
    return wanted.keys() == found.keys() and all(
        (found[name].dtype, tuple(found[name].shape[1:])) == (values.dtype, values.shape)
        for name, values in wanted.items()
    )


def _outside(values: Values, found: Tensor, filler: int | None) -> Tensor:
    if filler is not None and (values.varies or filler == IGNORED):
        usual = max(values.low or 0, 0) if values.high is None else values.high
        found = torch.where(found == filler, torch.as_tensor(usual, dtype=found.dtype), found)
    return values.outside(found)


def within(declaration: Declaration, dataset: Dataset) -> Dataset:
    """Return the data with what is outside left out of training, and blank.

    >>> x, y = torch.tensor([[0.5], [torch.nan]]), torch.zeros(2)
    >>> within(Declaration(Values(shape=(1,)), Values()), Dataset("two", x, y, x, y, None)).left_out
    tensor([False,  True])
    """
    out = outside(declaration, dataset)
    if not bool(out.any()):
        return dataset

    def blank(column: Tensor) -> Tensor:
        return torch.where(out.view(-1, *[1] * (column.dim() - 1)), torch.zeros_like(column), column)

    x, y = each(dataset.x_train, blank), blank(dataset.y_train)
    return replace(dataset, x_train=x, y_train=y, left_out=out)


def fitted(
    declaration: Declaration,
    load: Callable[[], Any],
    read: Callable[[Any], Dataset],
    tell: Callable[[str], None],
    least: int = 1,
    one_by_one: Callable[[], Sequence[Callable[[], Any]]] = tuple,
) -> Dataset:
    """Return a client's data whatever they are; what is wrong with them is told to their owner alone.

    `load` returns them as they are given, `read` reads them. Where they cannot be read as a whole, they are
    read in parts; where they cannot be loaded as a whole, `one_by_one` says how to load those of each
    record. There are `least` places at least, if need be empty ones.
    """
    found = [*_fitted(declaration, load, read, tell, one_by_one)]
    held = sum(len(one.y_train) for one in found)
    lacking = max(least, 1) - held
    return _joined([*found, *([_places(declaration, lacking)] if lacking > 0 else [])])


def _fitted(
    declaration: Declaration,
    load: Callable[[], Any],
    read: Callable[[Any], Dataset],
    tell: Callable[[str], None],
    one_by_one: Callable[[], Sequence[Callable[[], Any]]],
) -> Iterator[Dataset]:
    try:
        given = load()
        try:
            dataset = read(given)
            if _alike(declaration, dataset):
                yield within(declaration, dataset)
                return
            why = "not all have the columns, types and shapes that are declared"
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
        tell(f"records are read in parts: {why}")
        yield _in_parts(declaration, given, read)
    except BaseException as error:
        tell(f"records cannot be loaded together: {type(error).__name__}: {error}")
        try:
            alone = [*one_by_one()]
        except BaseException as again:
            tell(f"no record can be loaded: {type(again).__name__}: {again}")
            return
        for one in alone:
            yield from _fitted(declaration, one, read, _unsaid, tuple)


def _unsaid(said: str) -> None:
    """Say nothing: it was said of all together."""


def _joined(parts: Sequence[Dataset]) -> Dataset:
    """Return the data sets of one client as one."""
    columns = [columns_of(part.x_train) for part in parts]
    x = {name: torch.cat([one[name] for one in columns]) for name in columns[0]}
    left_out = [
        torch.zeros(len(part.y_train), dtype=torch.bool) if part.left_out is None else part.left_out
        for part in parts
    ]
    y = torch.cat([part.y_train for part in parts])
    return replace(
        parts[0],
        x_train=x if isinstance(parts[0].x_train, Mapping) else x[""],
        y_train=y,
        left_out=torch.cat(left_out),
        natural=Holdings([np.arange(len(y))], [], []),
    )


def _in_parts(declaration: Declaration, given: Any, read: Callable[[Any], Dataset]) -> Dataset:
    """Read halves, and halves of them, down to the records that cannot be read: these leave their places."""
    part, count = _parts(given)
    places = _places(declaration, count)
    assert places.left_out is not None
    x, y = columns_of(places.x_train), places.y_train
    waiting = [slice(0, count)]
    while waiting:
        rows = waiting.pop()
        size, middle = rows.stop - rows.start, (rows.start + rows.stop) // 2
        try:
            one = read(part(rows))
            found = {name: column.to(x[name].dtype) for name, column in columns_of(one.x_train).items()}
            one = replace(one, x_train=found if isinstance(one.x_train, Mapping) else found[""])
            if len(one.y_train) != size or not _alike(declaration, one):
                raise ValueError
        except BaseException:
            waiting += [slice(rows.start, middle), slice(middle, rows.stop)] if size > 1 else []
            continue
        one = within(declaration, one)
        for name, column in columns_of(one.x_train).items():
            x[name][rows] = column
        y[rows] = one.y_train
        places.left_out[rows] = False if one.left_out is None else one.left_out
    return places


def _parts(given: Any) -> tuple[Callable[[slice], Any], int]:
    """Return a function that gives some records, in the form they all have, and their number."""
    if is_table(given):
        share = given if isinstance(given, Share) else whole(given)
        return lambda rows: replace(share, rows=share.rows[rows]), len(share.rows)
    if isinstance(given, tuple) and len(given) == 2:
        x, y = given
        return lambda rows: (_some(x, rows), _some(y, rows)), len(y)
    if isinstance(given, Mapping):
        return lambda rows: _some(given, rows), len(next(iter(given.values())))
    if hasattr(given, "column_names"):
        return lambda rows: {name: given[name][rows] for name in given.column_names}, len(given)
    return lambda rows: torch.utils.data.Subset(given, range(rows.start, rows.stop)), len(given)


def _some(given: Any, rows: slice) -> Any:
    if isinstance(given, Mapping):
        return {name: column[rows] for name, column in given.items()}
    return given.iloc[rows] if hasattr(given, "iloc") else given[rows]


def _places(declaration: Declaration, count: int) -> Dataset:
    """Return so many empty places."""
    blank = stand_in(declaration, count, Key(0))
    x = each(blank.x_train, torch.zeros_like)
    left_out = torch.ones(count, dtype=torch.bool)
    return replace(blank, x_train=x, y_train=torch.zeros_like(blank.y_train), left_out=left_out)
