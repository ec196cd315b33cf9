"""How many training examples change where one record does: `trilemma check --neighbours`.

An ε for one example is one for one record if `data` turns neighbouring records into neighbouring examples:
whoever ranks, scales, fills or deals records by other records moves many examples with one. Here pairs of
record lists that differ in one record are drawn, and what a task makes of both is compared, as multisets:
the order of examples reveals nothing, because batches are drawn at random.

Trying finds mistakes and proves nothing. What proves it is that `data` looks at one record at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data.types import Dataset, columns_of
from trilemma.task.task import Task

PAIRS = 100
"""Pairs of neighbours that are drawn, over all clients together."""

LOOKED_AT = 500
"""Records, about, whose values a changed record takes on."""


@dataclass(frozen=True)
class Change:
    """What became of a client's examples where one record was changed: so many `examples` were replaced.

    `what` says how the record was changed. `size` and `after` are how many examples there were before and
    after, and `refused` is what was raised instead, where `data` did not return.
    """

    client: int
    what: str
    size: int
    after: int
    examples: int = 0
    refused: str = ""


def changes(task: Task, pairs: int = PAIRS, key: Key | None = None) -> list[Change]:
    """Draw neighbours among every client's records, and return what changes of its examples.

    Args:
        task: A task with `records`, whose number of clients is known.
        pairs: How many pairs are drawn, over all clients together; at least one for each.
        key: What they are drawn from.
    """
    clients = task.clients_known
    if task.records is None or clients is None:
        task.made_of(0, ())  # says what is missing
        raise UserError(
            "how many clients are there? Say it with --clients, or clients = … in the task's file"
        )
    key = key or Key(1).fold("neighbours")
    return [
        change
        for client in range(clients)
        for change in _of_client(task, client, -(-pairs // clients), key.fold("client", client))
    ]


def _of_client(task: Task, client: int, pairs: int, key: Key) -> Iterator[Change]:
    """Yield what changes of one client's examples."""
    assert task.records is not None
    records = [*task.records(client)]
    if len(records) < 2:
        raise UserError(f"client {client} has {len(records)} records; two are needed to change one of them")
    before = _counted(task.made_of(client, records))
    size = before.total()
    for what, changed in _neighbours(records, pairs, key.numpy()):
        try:
            after = _counted(task.made_of(client, changed))
        except UserError as error:
            yield Change(client, what, size, size, refused=str(error))
            continue
        moved = max((before - after).total(), (after - before).total())
        yield Change(client, what, size, after.total(), moved)


def _neighbours(records: list[Any], pairs: int, draw: np.random.Generator) -> Iterator[tuple[str, list[Any]]]:
    """Yield lists with one record changed: a copy of another one, or another value in one of its columns.

    Every value was seen among the records, so what `data` cannot read is not put there.
    """
    for turn in range(pairs):
        place, other = (int(one) for one in draw.choice(len(records), 2, replace=False))
        parts = _parts(records[place])
        # A copy, then one column after the other: a label or a gap moves more than an average column.
        column = None if turn % 4 == 0 or not parts else parts[(turn - 1 - turn // 4) % len(parts)]
        if column is None:
            found, what = records[other], f"record {place} becomes a copy of record {other}"
        else:
            values = _values(records, column)
            value = values[int(draw.integers(len(values)))]
            found = _with(records[place], column, value)
            what = f"record {place}: {column!r} becomes another record's"
        yield what, [*records[:place], found, *records[place + 1 :]]


def _parts(record: Any) -> list[Any]:
    """Return the names or places of a record's columns; none where it is one thing."""
    if isinstance(record, Mapping):
        return [*record]
    if isinstance(record, list | tuple) or (isinstance(record, np.ndarray) and record.ndim == 1):
        return [*range(len(record))]
    return []


def _values(records: Sequence[Any], column: Any) -> list[Any]:
    """Return the different values of a column, among some of the records: rare ones as likely as others."""
    found: dict[str, Any] = {}
    for record in records[:: -(-len(records) // LOOKED_AT)]:
        if column in _parts(record):
            found.setdefault(repr(record[column]), record[column])
    return [*found.values()]


def _with(record: Any, column: Any, value: Any) -> Any:
    """Return a record with another value in one column."""
    if isinstance(record, Mapping):
        return {**record, column: value}
    if isinstance(record, tuple):
        return (*record[:column], value, *record[column + 1 :])
    changed = record.copy()
    changed[column] = value
    return changed


def _counted(dataset: Dataset) -> Counter[bytes]:
    """Return how often each training example is there."""
    columns = [*columns_of(dataset.x_train).values(), dataset.y_train]
    rows = zip(*([row.tobytes() for row in one.numpy()] for one in columns), strict=True)
    return Counter(b"".join(row) for row in rows)


def told(found: Sequence[Change], examples: int | None) -> tuple[list[str], list[str]]:
    """Say what neighbours showed: what was seen, and what is wrong with it.

    `examples` is how many every client counts as holding, where the task says so.
    """
    worst = max(found, key=lambda change: change.examples)
    refused = [change for change in found if change.refused]
    sizes = [change for change in found if change.size != change.after]
    seen = [
        f"{len(found)} pairs of neighbours, one record changed in each: at most {worst.examples} training "
        f"examples change (1 is right)"
    ]
    if examples is not None:
        seen.append(f"every client counts as holding {examples:,} examples, whatever it holds")
    problems = []
    if worst.examples > 1:
        problems.append(
            f"client {worst.client}, {worst.what}: {worst.examples} of its {worst.size} training examples "
            f"change. An ε for one example is then worth {worst.examples} times that ε, with a larger δ, for "
            "one record. Decide about each record by that record and public constants alone (tl.split, "
            "tl.fill): no ranks, means, counts or sorted lists over records; see docs/own-task.md"
        )
    elif sizes and examples is None:
        one = sizes[0]
        problems.append(
            f"client {one.client}, {one.what}: it then has {one.after} training examples instead of "
            f"{one.size}, and the noise is reckoned from the fewest that a client has. Say a public number "
            "in the task: examples = …, as many as every client is sure to have, or nearly"
        )
    if refused:
        one = refused[0]
        problems.append(
            f"client {one.client}, {one.what}: {one.refused} ({len(refused)} of {len(found)} pairs). Such a "
            "record ends a simulation, and at a node all are read again one by one: fill in what cannot be "
            "read, or leave such records out"
        )
    return seen, problems
