"""Whom the rule trusted: every client's share in the aggregate, over a run, and as a picture of rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.learning.defences.evidence import Expulsion
from trilemma.report.picture_files import save_picture


@dataclass(frozen=True)
class Suspect:
    """A client, and how far the rule trusted it: its mean weight over the `heard` rounds it was heard in.

    `absent`, `unreached`, `rejected` and `late` count the rounds in which it was silent, was not reached by
    the carrier, had its answer turned away, and was neither waited for nor there.
    `expelled` says in which round and for what it was expelled for good, in words; empty where it was not.
    """

    client: int
    weight: float
    heard: int
    absent: int = 0
    rejected: int = 0
    unreached: int = 0
    late: int = 0
    expelled: str = ""


NEWCOMERS = 2000
"""Clients at most that come later, as many as a roster holds: a record that names others is no record."""


def places(clients: int, records: Iterable[Record]) -> int:
    """Return how many places there are: `clients` as configured, and those of clients that came later.

    >>> places(2, [Record(1, weights={0: 0.5, 1: 0.5}), Record(2, weights={0: 0.4, 3: 0.6})])
    4
    """
    everybody = (client for one in records for client in (*one.weights, *one.late))
    found = max(clients, 1 + max(everybody, default=-1))
    if found > clients + NEWCOMERS:
        raise UserError(f"the records name client {found - 1}, and there were {clients} clients at first")
    return found


def trusted(clients: int, records: Sequence[Record]) -> list[Suspect]:
    """Return the clients, the least trusted first.

    >>> trusted(2, [Record(1, weights={0: 0.9, 1: 0.1})])[0]
    Suspect(client=1, weight=0.1, heard=1, absent=0, rejected=0, unreached=0, late=0, expelled='')
    """
    weights: dict[int, list[float]] = {client: [] for client in range(places(clients, records))}
    absent, unreached, rejected, late = (Counter[int | None]() for _ in range(4))
    for record in records:
        for client, weight in record.weights.items():
            weights[client].append(weight)
        absent.update(record.absent)
        unreached.update(client for client, _ in record.unreached)
        rejected.update(client for client, _ in record.rejected)
        late.update(record.late)
    found = [
        Suspect(
            client,
            round(math.fsum(own) / len(own), 6) if own else 0.0,
            len(own),
            absent[client],
            rejected[client],
            unreached[client],
            late[client],
            "; ".join(why for record in records for who, why in expulsions(record) if who == client),
        )
        for client, own in weights.items()
    ]
    return sorted(found, key=lambda one: (not one.expelled, one.weight, -one.rejected, one.client))


def shares(clients: int, seeds: Mapping[int, Sequence[Record]]) -> np.ndarray:
    """Return the clients' shares in the aggregate (clients, rounds), the mean over seeds; NaN: not heard.

    >>> shares(2, {1: [Record(1, weights={0: 0.9, 1: 0.1}), Record(2, weights={0: 1.0})]}).tolist()
    [[0.9, 1.0], [0.1, nan]]
    """
    everything = [record for records in seeds.values() for record in records]
    size = places(clients, everything), max((record.round for record in everything), default=0)
    total, heard = np.zeros(size), np.zeros(size)
    for records in seeds.values():
        for record in records:
            for client, weight in record.weights.items():
                total[client, record.round - 1] += weight
                heard[client, record.round - 1] += 1
    return np.divide(total, heard, out=np.full_like(total, np.nan), where=heard > 0)


def expulsions(record: Record) -> list[tuple[int, str]]:
    """Return who was expelled in a round, and why in words.

    >>> expulsions(Record(4, expelled=(Expulsion(2, "length", 9.0, 7.5).plain(),)))
    [(2, 'round 4, length: 9 > 7.5')]
    """
    found = [Expulsion.read(one) for one in record.expelled]
    return [(one.client, f"round {record.round}, {one}") for one in found]


def plot_shares(table: np.ndarray, path: Path, title: str = "", liars: Collection[int] = ()) -> Path:
    """Draw shares (clients, rounds) as a map into a PNG file and return its path.

    Grey: not heard in that round. Known `liars` are named as such.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # without pyplot: no global state, no display needed
    from matplotlib.ticker import MaxNLocator

    clients, rounds = table.shape
    figure = Figure(figsize=(7.5, min(12, 2.2 + 0.22 * clients)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps["viridis"].with_extremes(bad="lightgrey")
    edges = (0.5, rounds + 0.5, clients - 0.5, -0.5)
    image = axes.imshow(
        table, aspect="auto", interpolation="nearest", cmap=colours, vmin=0.0, vmax=_most(table), extent=edges
    )
    step = max(1, clients // 40)
    rows = range(0, clients, step)
    axes.set_yticks(list(rows), [f"{row} lies" if row in liars else str(row) for row in rows])
    axes.tick_params(axis="y", labelsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="round", ylabel="client", title=title)
    figure.colorbar(image, ax=axes, label="share in the aggregate")
    return save_picture(figure, path)


def _most(table: np.ndarray) -> float:
    """Return where the colours end: the largest share, at least twice an equal one."""
    heard = table[np.isfinite(table)]
    return float(max(heard.max(initial=0.0), 2 / len(table)))
