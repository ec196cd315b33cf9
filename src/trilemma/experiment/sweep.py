"""`[sweep]`: the values that keys of a configuration take, one run for each combination.

    [sweep]
    seeds = "1-3"                                    # of every run
    aggregation.rule = ["mean", "caf"]               # every rule
    attack = ["sf", {name = "alie", strength = 1.5}] # with every attack

    zip = [["federation.byzantine", "federation.tolerate"]]   # these two go together, value by value
    federation.byzantine = [1, 2]
    federation.tolerate = [2, 3]

`zip = true` lets all keys go together.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trilemma.base.errors import ConfigError, nearest
from trilemma.experiment.assign import Assignment, Tables, assigned
from trilemma.experiment.own import Own
from trilemma.experiment.parsing import Config, parse, read_tables

ABSENT = "–"
"""What stands for a key that a configuration does not have."""


MOST_CELLS = 100_000
"""Cells that one sweep may have: more is a slip of the pen."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: the values its keys take, and the configuration they make.

    `edition` is the digest of a task, where data and model are a task's.
    """

    values: Mapping[str, Any] = field(compare=False)
    config: Config
    edition: str = ""

    @cached_property
    def name(self) -> str:
        """A hash of the configuration: equal runs have equal names, whatever sweep they stand in."""
        said = json.dumps([self.config.dump(), self.edition], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """The values in words."""
        return ", ".join(worded(value) for value in self.values.values()) or "the file as it is"

    @property
    def rounds(self) -> int:
        """Rounds of all its seeds."""
        return self.config.run.rounds * len(self.config.run.seeds)


@dataclass(frozen=True)
class Sweep:
    """The cells of a sweep, and the combinations of values that make no configuration, with the reason."""

    cells: tuple[Cell, ...]
    refused: tuple[tuple[Mapping[str, Any], str], ...] = ()
    notes: tuple[str, ...] = ()

    def only(self, wanted: Iterable[str]) -> Sweep:
        """Return the cells that have these values: `KEY=VALUE`; of several for one key, any will do.

        >>> grid = sweep({"sweep": {"run.rounds": [5, 9], "aggregation.rule": ["mean", "cwmed"]}})
        >>> [cell.label for cell in grid.only(["run.rounds=9", "aggregation.rule=mean"]).cells]
        ['9, mean']
        """
        asked: dict[str, list[Any]] = {}
        for path, value in map(assigned, wanted):
            if self.cells and all(value_at(cell.config, path) is ABSENT for cell in self.cells):
                swept = dict.fromkeys(key for cell in self.cells for key in cell.values)
                raise ConfigError(f"--only: no cell has the key {path!r}: {nearest(path, swept)}")
            asked.setdefault(path, []).append(value)
        kept = tuple(
            cell
            for cell in self.cells
            if all(value_at(cell.config, path) in values for path, values in asked.items())
        )
        if not kept:
            there = (
                f"{path}: {', '.join(dict.fromkeys(worded(value_at(c.config, path)) for c in self.cells))}"
                for path in asked
            )
            raise ConfigError(f"--only leaves no cell of {len(self.cells)}; there are {'; '.join(there)}")
        return self if not asked else Sweep(kept, (), self.notes)


def load_sweep(
    path: Path | str,
    assignments: Iterable[str] = (),
    own: Own | None = None,
    plugins: Iterable[str] = (),
    edition: str = "",
) -> Sweep:
    """Read the sweep in a TOML file; without a `[sweep]` it has one cell. Arguments as `config.load`."""
    return sweep(read_tables(path, plugins), assignments, own, edition)


def sweep(
    raw: Mapping[str, Any], assignments: Iterable[Assignment] = (), own: Own | None = None, edition: str = ""
) -> Sweep:
    """Return the cells that nested plain values with a `sweep` table say; assignments change the rest.

    A combination that makes no configuration is refused alone, unless all of them are.

    >>> grid = sweep({"sweep": {"attack": {"name": ["sf", "lf"]}, "aggregation.rule": ["mean", "cwmed"]}})
    >>> [cell.label for cell in grid.cells]
    ['sf, mean', 'sf, cwmed', 'lf, mean', 'lf, cwmed']
    >>> sweep({"sweep": {"agregation.rule": ["mean"]}})
    Traceback (most recent call last):
    trilemma.base.errors.ConfigError: agregation.rule = mean: unknown table [agregation]: did you mean ...
    """
    table = raw.get("sweep", {})
    if not isinstance(table, dict):
        raise ConfigError(f"[sweep] must be a table, not {table!r}")
    axes, seeds, together = _read(table)
    base = Tables.read({key: value for key, value in raw.items() if key != "sweep"}, ()).values
    cells: dict[str, Cell] = {}
    refused: list[tuple[Mapping[str, Any], str]] = []
    notes: dict[str, None] = {}
    for values in _combinations(axes, together):
        said = [*([("run.seeds", seeds)] if seeds is not None else []), *values.items(), *assignments]
        try:
            config = parse(base, said, own)
        except ConfigError as error:
            refused.append((values, str(error)))
            continue
        notes |= dict.fromkeys(config.notes)
        cell = Cell(values, config, edition)
        if cell.name in cells:
            notes[f"{cell.label}: the same run as {cells[cell.name].label}"] = None
        cells.setdefault(cell.name, cell)
    if not cells:
        first, reason = refused[0]
        raise ConfigError(f"{described(first)}: {reason}" if first else reason)
    return Sweep(tuple(cells.values()), tuple(refused), tuple(notes))


def value_at(config: Config, path: str) -> Any:
    """Return what a configuration says at `path`, a whole table where it ends there.

    >>> value_at(parse({}), "aggregation.rule"), value_at(parse({}), "attack.strength")
    ('mean', '–')
    """
    found: Any = config.dump()
    for key in path.split("."):
        if not isinstance(found, dict) or key not in found:
            return ABSENT
        found = found[key]
    return found


def leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of nested tables by its path, with its value.

    >>> dict(leaves({"run": {"rounds": 5}, "data": {"partition": {"name": "natural"}}}))
    {'run.rounds': 5, 'data.partition.name': 'natural'}
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def worded(value: Any) -> str:
    """Write a value as a person would: a name with its options in parentheses.

    >>> worded({"name": "alie", "strength": 1.5}), worded([1, 2]), worded(True), worded(0.1)
    ('alie(strength=1.5)', '1 2', 'true', '0.1')
    """
    if isinstance(value, Mapping):
        options = ", ".join(f"{key}={worded(one)}" for key, one in value.items() if key != "name")
        name = str(value.get("name", ""))
        return f"{name}({options})" if options else name
    if isinstance(value, list | tuple):
        return " ".join(map(worded, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def described(values: Mapping[str, Any]) -> str:
    """Write values with their keys.

    >>> described({"run.rounds": 5})
    'run.rounds = 5'
    """
    return ", ".join(f"{key} = {worded(value)}" for key, value in values.items())


def _read(table: Mapping[str, Any]) -> tuple[dict[str, list[Any]], Any, list[tuple[str, ...]]]:
    """Return the keys with their values, the seeds (None: not said), and which keys go together."""
    axes = dict[str, list[Any]]()
    for path, values in _axes({key: value for key, value in table.items() if key not in ("seeds", "zip")}):
        if path in axes:  # once as "a.b", once as a table a with b
            raise ConfigError(f"[sweep] {path} is said twice: give all its values in one list")
        axes[path] = values
    for path in axes:
        above, _, key = path.rpartition(".")  # attack = ["alie"] goes with attack.strength, not with its name
        if any(key == "name" or (isinstance(one, Mapping) and key in one) for one in axes.get(above, ())):
            raise ConfigError(f"[sweep] {above} and {path} both say {path}: allowed is one of them")
    if "seeds" in table and "run.seeds" in axes:
        raise ConfigError("[sweep] seeds and run.seeds say the same: allowed is one of them")
    together = table.get("zip", False)
    if isinstance(together, bool):
        groups = [tuple(axes)] if together and axes else []
    elif isinstance(together, list) and all(isinstance(one, list) for one in together):
        groups = [tuple(map(str, one)) for one in together]
    else:
        raise ConfigError(
            '[sweep] zip: allowed are true and lists of keys, as in [["run.rounds", "privacy.clip"]]'
        )
    named = [key for group in groups for key in group]
    for key in named:
        if key not in axes:
            raise ConfigError(f"[sweep] zip names {key!r}, which has no values: {nearest(key, axes)}")
        if named.count(key) > 1:
            raise ConfigError(f"[sweep] zip names {key!r} twice")
    for group in groups:
        if len({len(axes[key]) for key in group}) > 1:
            counts = ", ".join(f"{key} has {len(axes[key])}" for key in group)
            raise ConfigError(f"[sweep] keys that go together need as many values each: {counts}")
    return axes, table.get("seeds"), groups


def _axes(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, list[Any]]]:
    for key, value in table.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _axes(value, f"{path}.")
        elif isinstance(value, list) and value:
            yield path, value
        else:
            raise ConfigError(f"[sweep] {path} = {value!r}: allowed is a list with at least one value")


def _combinations(
    axes: Mapping[str, list[Any]], together: Sequence[tuple[str, ...]]
) -> Iterator[dict[str, Any]]:
    """Yield the values of every cell; the last key changes fastest."""
    grouped = {key: group for group in together for key in group}
    groups = dict.fromkeys(grouped.get(key, (key,)) for key in axes)
    choices = [list(zip(*(axes[key] for key in group), strict=True)) for group in groups]
    if (count := math.prod(map(len, choices))) > MOST_CELLS:
        raise ConfigError(f"[sweep] says {count:,} cells; allowed are at most {MOST_CELLS:,}")
    for chosen in itertools.product(*choices):
        found = {
            k: v
            for group, values in zip(groups, chosen, strict=True)
            for k, v in zip(group, values, strict=True)
        }
        yield {key: found[key] for key in axes}
