"""The arena: every rule against every adversary, and the worst case of each.

A cell is one run of the sweep: what is trained, how many lie, under which threat model, by which rule,
against which adversary; all seeds together. Cells that are finished are not run again, so a stopped arena
continues. What is reported is the least accuracy over adversaries and seeds, never a mean.

What was measured is kept as rows in one file (`record`, results/frontier.json), a row for every seed of every
cell; tables are made from them: the worst case of every rule (`worst`), and what every adversary left
(`standings`).

Longer than most modules, so that rows, and the tables that are made from them, stand in one place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_type_hints

from trilemma import files, report
from trilemma.config import Cell, load
from trilemma.errors import ConfigError
from trilemma.report import Result, Table
from trilemma.simulate.directory import RunDirectory
from trilemma.simulate.experiment import choose_device
from trilemma.simulate.sweep.grid import finished

ROOT = ("aggregation.root=100",)
"""Public examples at the server."""

RULES: Mapping[str, tuple[str, ...]] = {
    **{
        rule: (f"aggregation.rule={rule}",)
        for rule in (
            "mean",
            "cwmed",
            "nnm+cwmed",
            "caf",
            "smea",
            "noise-test+mean",
            "safeguard+mean",
            "evidence+mean",
            "evidence+caf",
            "evidence+nnm+caf",
        )
    },
    **{rule: (f"aggregation.rule={rule}", *ROOT) for rule in ("fltrust+mean", "noise-test-rank+mean")},
    "evidence+mean with a root set": ("aggregation.rule=evidence+mean", *ROOT, "aggregation.tune=model"),
    "root set alone": ("aggregation.rule=mean", *ROOT, "aggregation.tune=alone"),
    "evidence+caf, then at home": ("aggregation.rule=evidence+caf", "aggregation.tune=clients"),
    "every client alone": ("aggregation.rule=mean", "aggregation.tune=clients-alone"),
}
"""smea searches subsets of n − f and is left out where there are too many: everywhere but on phishing-7."""

ADVERSARIES: Mapping[str, tuple[str, ...]] = {
    "loss": ("attack={name='adaptive', direction='loss'}",),
    "rotated loss": ("attack={name='adaptive', direction='loss', noise='rotated'}",),
    "stretched loss": ("attack={name='adaptive', direction='loss', noise='stretched'}",),
    "rotated slanted": ("attack={name='adaptive', direction='slanted', noise='rotated'}",),
    "errors": ("attack={name='adaptive', direction='errors'}",),
    "stretched errors": ("attack={name='adaptive', direction='errors', noise='stretched'}",),
    "sharper stretched errors": (
        "attack={name='adaptive', direction='errors', noise='stretched', sharper=2.0}",
    ),
    "stretched unshown errors": ("attack={name='adaptive', direction='unshown-errors', noise='stretched'}",),
    "gradient": ("attack={name='adaptive'}",),
    "rotated": ("attack={name='adaptive', noise='rotated'}",),
    "across": ("attack={name='adaptive', direction='across'}",),
    "unseen": ("attack={name='adaptive', direction='loss', greedy=false}",),
    "half": ("attack={name='adaptive', direction='loss', role='half'}",),
    "unshown": ("attack={name='adaptive', direction='unshown', noise='rotated'}",),
    "alie": ("attack={name='alie'}",),
    "foe": ("attack={name='foe'}",),
}
"""Who attacks every ground."""

LATER: Mapping[str, tuple[str, ...]] = {
    "sleeper": ("attack={name='adaptive', direction='loss', start=15}",),
    "burst": ("attack={name='adaptive', direction='loss', stop=10}",),
}
"""Those who choose their rounds, where there are many."""

EVERY_ADVERSARY = {**ADVERSARIES, **LATER}

THREATS: Mapping[str, tuple[str, ...]] = {
    "guaranteed SecLDP": ("privacy.threat=secldp", "privacy.assume=guaranteed"),
    "published SecLDP": ("privacy.threat=secldp", "privacy.assume=published"),
    "ByzLDP": ("privacy.threat=byzldp", "privacy.assume=guaranteed"),
    "LDP": ("privacy.threat=ldp", "privacy.assume=guaranteed"),
}


@dataclass(frozen=True)
class Ground:
    """What is trained: a ready configuration, changes to it, how many may lie; `small`: few clients.

    `shared` are more changes where clients share noise, under every threat model but LDP.
    """

    ready: str
    changes: tuple[str, ...] = ()
    liars: tuple[int, ...] = (5, 10, 20)
    threats: tuple[str, ...] = tuple(THREATS)
    adversaries: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ADVERSARIES)
    small: bool = False
    shared: tuple[str, ...] = ()


def once(lr: float, clip: float) -> tuple[str, ...]:
    """Return the changes to one release of clients that train on their own first, as in `frontier-mnist`."""
    return (
        f"algorithm={{name='fedavg', lr={lr}, local_steps=60, batch_size=50}}",
        f"privacy={{threat='secldp', clip={clip}, epsilon=27.8, delta=1e-4, accountant='exact'}}",
        "run.rounds=1",
    )


def spending(epsilon: float) -> tuple[str, ...]:
    """Return the changes to noise that spends so much: a multiplier, as papers give it, is LDP's alone."""
    return (f"privacy={{threat='secldp', clip=1.0, epsilon={epsilon}, delta=1e-4}}",)


GROUNDS: Mapping[str, Ground] = {
    "mnist-features": Ground("frontier-mnist"),
    "mnist-whitened": Ground("frontier-mnist-whitened"),
    "mnist-drawn": Ground("frontier-mnist-drawn"),
    "mnist-few": Ground("frontier-mnist-drawn", ("data.examples=6000",), threats=("guaranteed SecLDP",)),
    "mnist-subspace-once": Ground("few-coordinates-mnist-subspace", once(10.0, 10.0)),
    "mnist-head-once": Ground("cafcor-mnist", ("model.train=head", *once(0.6, 3.0))),
    "mnist-cnn-once": Ground("cafcor-mnist", once(0.15, 3.0)),
    "phishing-7": Ground("safe-dshb-phishing", liars=(3,), small=True, shared=spending(1.375)),
    "phishing-30": Ground("safe-dshb-phishing", ("federation.clients=30",), (10,), shared=spending(8.369)),
    "mnist-subspace": Ground("few-coordinates-mnist-subspace", adversaries=EVERY_ADVERSARY),
    "mnist-head": Ground(
        "cafcor-mnist", ("model.train=head", "algorithm.lr=0.3"), adversaries=EVERY_ADVERSARY
    ),
    "mnist-cnn": Ground("cafcor-mnist", adversaries=EVERY_ADVERSARY),
}
QUICK, QUICK_THREATS = ("phishing-7",), ("LDP",)
"""What a quick look trains, and whom it trusts: minutes on a CPU."""


@dataclass(frozen=True)
class Bout:
    """A cell and where it stands."""

    ground: str
    threat: str
    liars: int
    rule: str
    adversary: str
    cell: Cell


def bouts(
    grounds: Sequence[str] = tuple(GROUNDS),
    rules: Sequence[str] = tuple(RULES),
    seeds: str = "1-3",
    changes: Sequence[str] = (),
    threats: Sequence[str] = tuple(THREATS),
    adversaries: Sequence[str] = (),
    liars: Sequence[int] = (),
    refused: Callable[[str], None] = lambda reason: None,
) -> Iterator[Bout]:
    """Yield all cells of some grounds; what a rule is not defined for is `refused`, with the reason.

    `rules` are names of `RULES` or any rule's. Without `adversaries` and `liars`: all of a ground's. A cell
    says on which device it runs: this machine's, unless `changes` do.

    >>> [bout.rule for bout in bouts(["phishing-7"], ["mean", "caf"], threats=["LDP"], adversaries=["loss"])]
    ['mean', 'caf']
    """
    wanted = adversaries or tuple(EVERY_ADVERSARY)
    here = f"run.device={choose_device('auto').type}"
    for name in grounds:
        ground = GROUNDS[name]
        for threat in (one for one in ground.threats if one in threats):
            noise = () if threat == "LDP" else ground.shared
            for count in (one for one in ground.liars if one in (liars or ground.liars)):
                for rule in (one for one in rules if one != "smea" or ground.small):
                    for adversary in (one for one in ground.adversaries if one in wanted):
                        said = [*ground.changes, *noise, *THREATS[threat], f"federation.byzantine={count}"]
                        said += [*RULES.get(rule, (f"aggregation.rule={rule}",)), f"run.seeds='{seeds}'"]
                        try:
                            told = (*said, *ground.adversaries[adversary], here, *changes)
                            config = load(ground.ready).with_(*told)
                        except ConfigError as error:
                            refused(str(error))
                            continue
                        place = {"threat": threat, "liars": count, "rule": rule, "adversary": adversary}
                        yield Bout(name, threat, count, rule, adversary, Cell(place, config))


@dataclass(frozen=True)
class Row:
    """One seed of one cell: where it stands, its last accuracy, whom it expelled, ε and d.

    One that diverged got nothing right, and its ε is what it was to spend.
    """

    ground: str
    threat: str
    f: int
    rule: str
    adversary: str
    seed: int
    accuracy: float
    honest: int
    liars: int
    d: int
    epsilon: float | None
    """None: there is no guarantee, as under a published assumption."""
    device: str | None = None
    """Where it ran: a seed's noise on a CPU is not that on a GPU. None: nobody wrote it down."""

    @property
    def cell(self) -> tuple[str, str, int, str, str, int]:
        """Where it stands, and the seed."""
        return self.ground, self.threat, self.f, self.rule, self.adversary, self.seed

    @property
    def place(self) -> tuple[str, str, int, str, str, int, str]:
        """What no two rows of a file have in common: devices draw other noise from one seed."""
        return *self.cell, self.device or ""


def rows(bouts: Iterable[Bout], out: Path) -> list[Row]:
    """Return what the finished cells under `out` measured."""
    found = []
    for bout in bouts:
        if finished(out, bout.cell.name):
            result = report.load(out / bout.cell.name)
            found += [_row(bout, result, seed) for seed in result.seeds]
    return found


def _row(bout: Bout, result: Result, seed: int) -> Row:
    records, federation, summary = result.seeds[seed], result.config.federation, result.summary
    honest = federation.clients - federation.byzantine  # liars are the last ones
    gone = [int(one["client"]) for record in records for one in record.expelled]
    if str(seed) in summary.diverged:  # in its first round, maybe, of which there is no record
        accuracy, epsilon = 0.0, summary.epsilon.get(summary.accountant)
    else:
        accuracy, epsilon = records[-1].metrics.get("accuracy") or 0.0, records[-1].epsilon
    return Row(
        bout.ground,
        bout.threat,
        bout.liars,
        bout.rule,
        bout.adversary,
        seed,
        round(float(accuracy), 4),
        sum(client < honest for client in gone),
        sum(client >= honest for client in gone),
        RunDirectory.open(result.directory).dim,
        round(epsilon, 3) if epsilon is not None and math.isfinite(epsilon) else None,
        None if result.config.run.device == "auto" else result.config.run.device,
    )


def read(path: Path) -> list[Row]:
    """Return the rows that were recorded in a file; refuse one that holds anything else."""
    with files.readable(path, "results of an arena"):
        said = json.loads(path.read_text("utf-8"))
        kinds = get_type_hints(Row)
        return [_checked(Row(**row), kinds) for row in (said if isinstance(said, list) else [said])]


def _checked(row: Row, kinds: Mapping[str, type]) -> Row:
    """Return a row of a file; refuse one that no table has a place for."""
    for name, kind in kinds.items():
        if not isinstance(getattr(row, name), kind):
            raise ValueError(f"{name} = {getattr(row, name)!r}")
    for one, known in ((row.ground, GROUNDS), (row.threat, THREATS)):
        if one not in known:
            raise ValueError(f"{one!r} is none of {', '.join(known)}")
    return row


def record(path: Path, found: Iterable[Row]) -> None:
    """Put rows among those in a file, in place of earlier ones of the same cell, seed and device.

    One that says its device also takes the place of one that does not.
    """
    before = read(path) if path.exists() else []
    latest = {row.place: row for row in (*before, *found)}
    told = {row.cell for row in latest.values() if row.device is not None}
    kept = {place: row for place, row in latest.items() if row.device is not None or row.cell not in told}
    lines = ",\n".join(json.dumps(asdict(kept[place]), ensure_ascii=False) for place in sorted(kept))
    files.write_atomically(path, f"[\n{lines}\n]\n".encode())


def worst(found: Sequence[Row]) -> list[Table]:
    """Return a table for every ground: rules, and the least accuracy under every threat model and f.

    In parentheses how many seeds met the adversary that left it, where it is fewer than three. Where every
    rule was run, smea's row says how many subsets it would have to look at, if it cannot.
    """
    tables = []
    for ground in (name for name in GROUNDS if any(row.ground == name for row in found)):
        there = [row for row in found if row.ground == ground]
        columns = [
            (threat, liars)
            for threat in THREATS
            for liars in sorted({row.f for row in there if row.threat == threat})
        ]
        body = []
        for rule in sorted({row.rule for row in there}, key=_rank):
            of_rule = [row for row in there if row.rule == rule]
            cells = ([row for row in of_rule if (row.threat, row.f) == column] for column in columns)
            body.append((rule, *map(_worst, cells)))
        if not GROUNDS[ground].small and any(rule == "mean" for rule, *_ in body):
            body.append(("smea", *(subsets(ground, liars) for _, liars in columns)))
            body.sort(key=lambda row: _rank(row[0]))
        heads = (f"{threat}, f = {liars}" for threat, liars in columns)
        dims = ", ".join(f"{d:,}" for d in sorted({row.d for row in there}))
        spent = sorted({f"{row.epsilon:.1f}" for row in there if row.epsilon is not None})
        title = f"{ground}: d = {dims}, ε = {', '.join(spent) or 'none'}"
        tables.append(Table(title, ("rule", *heads), tuple(body), words=1))
    return tables


def subsets(ground: str, liars: int) -> str:
    """Say how many subsets of all but `liars` messages there are, which smea would search in every round.

    >>> subsets("phishing-30", 10), subsets("mnist-features", 20)
    ('(3·10⁷ subsets)', '(5·10²⁰ subsets)')
    """
    there = GROUNDS[ground]
    clients = load(there.ready).with_(*there.changes, f"federation.byzantine={liars}").federation.clients
    digit, power = f"{float(math.comb(clients, liars)):.0e}".split("e+")
    return f"({digit}·10{str(int(power)).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))} subsets)"


def _rank(rule: str) -> tuple[int, str]:
    order = list(RULES)
    return order.index(rule) if rule in order else len(order), rule


def _worst(group: Sequence[Row]) -> str:
    if not group:
        return "–"
    by = min(group, key=lambda row: row.accuracy).adversary
    return _least([row for row in group if row.adversary == by])


def markdown(found: Sequence[Row], part: str) -> str:
    """Return the tables for a page: `worst`, or by `adversaries`."""
    if part == "adversaries":
        return standings(found).markdown()
    return "\n\n".join(f"{one.title}\n\n{replace(one, title='').markdown()}" for one in worst(found))


def standings(found: Sequence[Row]) -> Table:
    """Return a row for every ground, threat, f and rule: the worst first, then every adversary's least.

    In parentheses how many seeds there are, where it is fewer than three.
    """
    known = [name for name in EVERY_ADVERSARY if any(row.adversary == name for row in found)]
    header = ("trained", "threat", "ε", "d", "f", "rule", "worst", "by", *known, "honest expelled")
    groups: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in found:
        groups.setdefault((row.ground, row.threat, row.f, row.rule), []).append(row)

    def place(key: tuple[str, str, int, str]) -> tuple[int, int, int, int, str]:
        ground, threat, liars, rule = key
        ranks = (list(GROUNDS).index(ground), list(THREATS).index(threat), liars)
        return *ranks, *_rank(rule)

    body = []
    for key in sorted(groups, key=place):
        ground, threat, liars, rule = key
        group = groups[key]
        least = min(group, key=lambda row: row.accuracy)
        epsilon = "–" if least.epsilon is None else f"{least.epsilon:.1f}"
        facts = epsilon, f"{least.d:,}", str(liars), rule, f"{least.accuracy:.2f}"
        by = [_least([row for row in group if row.adversary == name]) for name in known]
        lost = str(sum(row.honest for row in group))
        body.append((ground, threat, *facts, least.adversary, *by, lost))
    return Table("", header, tuple(body), words=2)


def _least(group: Sequence[Row]) -> str:
    if not group:
        return "–"
    seeds = len({row.seed for row in group})
    return f"{min(row.accuracy for row in group):.2f}" + (f" ({seeds})" if seeds < 3 else "")
