"""The arena: every rule against every adversary, and the worst case of each.

A cell is one run of the sweep: what is trained, how many lie, under which threat model, by which rule,
against which adversary; all seeds together. Cells that are finished are not run again, so a stopped arena
continues. What is reported is the least accuracy over adversaries and seeds, never a mean.

What was measured is kept as rows in one file (`record`, lab/results/frontier.json), a row for every seed of
every cell; `standings` makes tables of them, `missing` says what they lack.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from trilemma.base import files
from trilemma.base.errors import ConfigError, UserError
from trilemma.experiment import Cell, load
from trilemma.report import Result
from trilemma.report.loading import load_cell
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
    "ranked errors": ("attack={name='adaptive', direction='errors', noise='ranked'}",),
    "apart errors": ("attack={name='adaptive', direction='errors', role='apart'}",),
    "sacrificed": ("attack={name='adaptive', direction='loss', role='sacrificed'}",),
    "poisoned": ("attack={name='adaptive', direction='poisoned', noise='rotated'}",),
    "backdoor": ("attack={name='adaptive', direction='backdoor', noise='rotated'}",),
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


CELL = ["ground", "threat", "f", "rule", "adversary", "device", "d", "epsilon", "seeds"]
"""What a line of a file of rows holds: a cell on a device, and all seeds that were run there."""

OF_SEED = ["seed", "accuracy", "honest", "liars"]
"""What such a line holds of a seed."""


def rows(bouts: Iterable[Bout], out: Path) -> list[Row]:
    """Return what the finished cells under `out` measured."""
    found = []
    for bout in bouts:
        if finished(out, bout.cell.name):
            result = load_cell(out / bout.cell.name)
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
    if not path.exists():
        raise UserError(f"there is no file {str(path)!r} of an arena's rows")
    with files.readable(path, "results of an arena"):
        said = json.loads(path.read_text("utf-8"))
        if not isinstance(said, dict) or (said.get("columns"), said.get("of a seed")) != (CELL, OF_SEED):
            raise ValueError(f"it does not begin with the columns {', '.join(CELL)}; {', '.join(OF_SEED)}")
        kinds = get_type_hints(Row)
        cells = [_told(CELL, cell) for cell in said["cells"]]
        return [
            _checked(Row(**_told(OF_SEED, seed), **{name: cell[name] for name in CELL[:-1]}), kinds)
            for cell in cells
            for seed in cell["seeds"]
        ]


def _told(columns: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return what a line says under its columns; refuse one that is too short or too long."""
    if not isinstance(values, list) or len(values) != len(columns):
        raise ValueError(f"{values!r} is not {', '.join(columns)}")
    return dict(zip(columns, values, strict=True))


def _checked(row: Row, kinds: Mapping[str, type]) -> Row:
    """Return a row of a file; refuse one that no table has a place for."""
    for name, kind in kinds.items():
        if not isinstance(getattr(row, name), kind):
            raise ValueError(f"{name} = {getattr(row, name)!r}")
    if not 0 <= row.accuracy <= 1 or not (row.epsilon is None or 0 <= row.epsilon < math.inf):
        raise ValueError(f"accuracy = {row.accuracy}, epsilon = {row.epsilon}")
    for one, known in ((row.ground, GROUNDS), (row.threat, THREATS)):
        if one not in known:
            raise ValueError(f"{one!r} is none of {', '.join(known)}")
    return row


def record(path: Path, found: Iterable[Row]) -> None:
    """Put rows among those in a file, in place of earlier ones of the same cell, seed and device.

    One that says its device also takes the place of one that does not. A line of the file is a cell on a
    device with all of its seeds, under the columns that the file begins with.
    """
    with files.changing(path):
        _write(path, (*(read(path) if path.exists() else ()), *found))


def _write(path: Path, rows: Iterable[Row]) -> None:
    """Write the latest of rows of the same cell, seed and device."""
    latest = {row.place: row for row in rows}
    told = {row.cell for row in latest.values() if row.device is not None}
    kept = {place: row for place, row in latest.items() if row.device is not None or row.cell not in told}
    lines: dict[tuple[Any, ...], list[list[Any]]] = {}
    for place in sorted(kept):
        line = tuple(getattr(kept[place], name) for name in CELL[:-1])
        lines.setdefault(line, []).append([getattr(kept[place], name) for name in OF_SEED])
    cells = ",\n".join(_plain([*line, seeds]) for line, seeds in lines.items())
    head = f'"columns": {_plain(CELL)},\n"of a seed": {_plain(OF_SEED)}'
    files.write_atomically(path, f'{{{head},\n"cells": [\n{cells}\n]}}\n'.encode())


def _plain(values: Sequence[Any]) -> str:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))
