"""Whom the rule trusted: every client's share in the aggregate, over a run, and as a picture of rounds.

Somebody always has the smallest share, so a small share alone accuses nobody. `outliers` names the clients
whose share is below what the others' spread explains, by a sequential test for outliers on one side.

Reference: Rosner (Technometrics 1983), "Percentage Points for a Generalized ESD Many-Outlier Procedure".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import scipy

from trilemma.base.errors import UserError
from trilemma.base.records import Record
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


ROUNDED = 1e-5
"""Differences of shares that count as none: records keep six digits."""

ALIKE, TRIED = 200, 9
"""Coordinates of messages that are alike, and how often a rule is asked about such."""

CHANCE = 0.01
"""How likely `outliers` is to name somebody where nobody lies and honest shares are spread like a normal."""

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


def outliers(clients: int, records: Sequence[Record], most: int) -> list[Suspect]:
    """Return at most `most` clients whose shares are smaller than honest clients' differ, smallest first.

    With i − 1 of n clients set aside, the smallest mean share w left is compared with the mean w̄ of the
    m = n − i others: (w̄ − w) / (s √(1 + 1/m)) is Student's t with m − 1 degrees of freedom. Here s is their
    standard deviation, or the standard error of a mean over rounds where that is larger: few clients may
    lie close by chance. m + 1 clients could have been the smallest, so the threshold is that of
    `CHANCE` / (m + 1). The largest i beyond its threshold counts, so that two liars do not hide each other.
    A client whose data are unlike all others' may be named as well: so are its messages.

    >>> records = [Record(t, weights={0: 0.3 + t % 2 / 50, 1: 0.35, 2: 0.35 - t % 2 / 50}) for t in (1, 2, 3)]
    >>> outliers(3, records, most=1)
    []
    """
    heard = [[one.weights[i] for one in records if i in one.weights] for i in range(places(clients, records))]
    known = {client: np.array(own) for client, own in enumerate(heard) if len(own) > 1}
    order = sorted(known, key=lambda client: float(known[client].mean()))
    found = 0
    for taken in range(1, min(most, len(order) - 3) + 1):
        rest = [known[client] for client in order[taken:]]
        means = np.array([own.mean() for own in rest])
        errors = [own.var(ddof=1) / len(own) for own in [known[order[taken - 1]], *rest]]
        spread = math.sqrt(max(means.var(ddof=1), float(np.mean(errors))) * (1 + 1 / len(rest)))
        gap = float(means.mean() - known[order[taken - 1]].mean())
        threshold = scipy.stats.t.ppf(1 - CHANCE / (len(rest) + 1), len(rest) - 1)
        if gap > max(threshold * spread, ROUNDED):
            found = taken
    people = {one.client: one for one in trusted(clients, records)}
    return [people[client] for client in order[:found]]


@lru_cache(maxsize=64)
def leaves_out(rule: str, clients: int, most: int) -> bool:
    """Tell whether a rule leaves clients out even where all messages are alike: then a share is only a rank.

    >>> leaves_out("mda", 7, 2), leaves_out("caf", 7, 2)
    (True, False)
    """
    import torch  # whoever asks where a federation stands waits for none of these

    from trilemma import aggregation
    from trilemma.base.keys import Key

    parsed, draw = aggregation.parse(rule, most), Key(0).torch()
    alike = (parsed(torch.randn((clients, ALIKE), generator=draw)).weights for _ in range(TRIED))
    return bool(np.median([float(one.min()) for one in alike]) < 0.1 / clients)


def verdict(
    rule: str, clients: int, records: Sequence[Record], most: int, weights: Sequence[float] = ()
) -> str:
    """Say who stands out by its share, or that nobody does; "" where there is nothing to tell.

    With public weights a share counts for what it is beside the weight: a small site is no suspect.
    """
    if weights:
        fair = dict(enumerate(clients * np.array(weights) / sum(weights)))
        records = [
            replace(one, weights={i: share / fair.get(i, 1.0) for i, share in one.weights.items()})
            for one in records
        ]
    everyone = [one for one in trusted(clients, records) if one.heard]
    if not most or not everyone or everyone[0].weight == everyone[-1].weight:
        return ""
    try:
        ranks = leaves_out(rule, clients, most)
    except UserError:
        return ""  # a plugin's rule, which is not known here
    if ranks:
        return f"nobody stands out: {rule} leaves clients out in every round, whether they lie or not"
    named = outliers(clients, records, most)
    if not named:
        return "nobody stands out: shares differ by no more than those of honest clients do"
    others = [one.weight for one in everyone if one not in named]
    who = ", ".join(f"{one.client} ({one.weight:.3f})" for one in named[:10])
    words = "client {} stands" if len(named) == 1 else "clients {} stand"
    return f"{words.format(who)} out by a small share: the others have {np.mean(others):.3f} on average"


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

    >>> from trilemma.learning.defences.evidence import Expulsion
    >>> expulsions(Record(4, expelled=(Expulsion(2, "length", 9.0, 7.5).plain(),)))
    [(2, 'round 4, length: 9 > 7.5')]
    """
    if not record.expelled:
        return []
    from trilemma.learning.defences.evidence import Expulsion

    found = [Expulsion.read(one) for one in record.expelled]
    return [(one.client, f"round {record.round}, {one}") for one in found]


class Suspects(list[Suspect]):
    """Clients, the least trusted first; a notebook shows their shares as a map of clients and rounds."""

    def __init__(self, clients: Iterable[Suspect], table: np.ndarray) -> None:
        super().__init__(clients)
        self.table = table

    def _repr_svg_(self) -> str:
        from matplotlib import colormaps
        from matplotlib.colors import TwoSlopeNorm, to_hex

        columns = np.array_split(np.arange(self.table.shape[1]), min(self.table.shape[1], 60))
        colours, scale = colormaps["RdYlBu"], TwoSlopeNorm(1 / len(self.table), 0.0, _most(self.table))
        width, height, left = 8, 14, 90
        parts = []
        for row, one in enumerate(self):
            label = f"{one.client}: {one.weight:.3f}"
            parts.append(f'<text x="{left - 6}" y="{row * height + 11}" text-anchor="end">{label}</text>')
            for column, rounds in enumerate(columns):
                heard = self.table[one.client, rounds]
                heard = heard[np.isfinite(heard)]
                colour = to_hex(colours(scale(heard.mean()))) if heard.size else "#888888"
                place = f'x="{left + column * width}" y="{row * height}"'
                parts.append(f'<rect {place} width="{width}" height="{height - 1}" fill="{colour}"/>')
        size = f'width="{left + width * len(columns)}" height="{height * len(self) + 16}"'
        below = "client: mean share; rounds to the right; red: less than an equal share, blue: more"
        parts.append(f'<text x="0" y="{height * len(self) + 12}">{below}</text>')
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10" '
            f'fill="#777777">{"".join(parts)}</svg>'
        )


def plot_shares(table: np.ndarray, path: Path, title: str = "", liars: Collection[int] = ()) -> Path:
    """Draw shares (clients, rounds) as a map into a PNG file and return its path.

    Red: less than an equal share; yellow: an equal one; blue: more; grey: not heard in that round. Known
    `liars` are named as such.
    """
    from matplotlib import colormaps
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure  # without pyplot: no global state, no display needed
    from matplotlib.ticker import MaxNLocator

    clients, rounds = table.shape
    figure = Figure(figsize=(7.5, min(12, 2.2 + 0.22 * clients)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps["RdYlBu"].with_extremes(bad="grey")
    scale = TwoSlopeNorm(1 / clients, 0.0, _most(table))
    edges = (0.5, rounds + 0.5, clients - 0.5, -0.5)
    image = axes.imshow(table, aspect="auto", interpolation="nearest", cmap=colours, norm=scale, extent=edges)
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
