"""`table.key=value` assignments: what `--set` may say, and what a new name leaves behind."""

from __future__ import annotations

import contextlib
import copy
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trilemma.base.errors import ConfigError

Assignment = str | tuple[str, Any]
"""`table.key=value` as text, or a path and its value."""


def assigned(assignment: str) -> tuple[str, Any]:
    """Read an assignment as text into a path and its value.

    >>> assigned("aggregation.rule=caf"), assigned("run.rounds=50")
    (('aggregation.rule', 'caf'), ('run.rounds', 50))
    """
    path, equals, text = assignment.partition("=")
    *parents, key = path.strip().split(".")
    whole_table = not parents and text.strip().startswith("{")
    if not equals or not key or not (parents or whole_table):
        raise ConfigError(f"cannot read {assignment!r}; allowed: table.key=value, as in run.rounds=50")
    value: Any = text.strip()  # a bare word is a string, so that --set aggregation.rule=caf works
    if key != "name" or value[:1] in "\"'":  # and a name always is: TOML would read nan as a number
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
    return path.strip(), value


@dataclass
class Tables:
    """Nested plain values on their way to a configuration: who said what, and what became of it.

    `assigned` holds the paths that assignments set; everything else came from the file. `notes` says what was
    left out.
    """

    values: dict[str, Any]
    before: Mapping[str, Any]
    assigned: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, raw: Mapping[str, Any], assignments: Iterable[Assignment]) -> Tables:
        """Apply assignments to a copy of `raw`."""
        tables = cls(copy.deepcopy(dict(raw)), raw)
        for assignment in assignments:
            tables.assign(assignment)
        return tables

    def assign(self, assignment: Assignment) -> None:
        """Apply `table.key=value` or `table={…}`, as text or as a path and its value."""
        path, value = assigned(assignment) if isinstance(assignment, str) else assignment
        *parents, key = path.split(".")
        if not parents:
            value = as_table(value)
        table = self.values
        for parent in parents:
            table[parent] = as_table(table.get(parent, {}))
            table = table[parent]
        table[key] = value
        self.assigned.add(".".join([*parents, key]))

    def part(self, *path: str) -> dict[str, Any]:
        """Return a copy of the table at `path`, empty where there is none."""
        return _part(self.values, path)

    def shed(self, where: str, default: str, old_keys: Iterable[str], new_keys: Iterable[str]) -> None:
        """Drop the options of a thing that an assignment replaced, where the new thing does not have them.

        Keys that were no options of the old thing either stay, and are refused later.
        """
        path = where.split(".")
        if f"{where}.name" not in self.assigned:
            return
        table = self.values
        for key in path:
            table = table[key]
        gone = [
            key
            for key in table
            if key in set(old_keys) - set(new_keys) and not self._was_assigned(f"{where}.{key}")
        ]
        for key in gone:
            old, new = self.name_before(where, default), table["name"]
            self.notes.append(
                f"[{where}] {key} = {table.pop(key)!r} is left out: {old} has it, {new} does not"
            )

    def name_before(self, where: str, default: str) -> str:
        """Return what the file calls the thing at `where`."""
        return str(_part(self.before, where.split(".")).get("name", default))

    def _was_assigned(self, path: str) -> bool:
        return any(said == path or said.startswith(path + ".") for said in self.assigned)


def as_table(value: Any) -> dict[str, Any]:
    """Read `partition = "dirichlet"` as `partition = {name = "dirichlet"}`."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict):
        raise ConfigError(f"expected a table or a name, not {value!r}")
    return dict(value)


def _part(values: Mapping[str, Any], path: Iterable[str]) -> dict[str, Any]:
    table = dict(values)
    for key in path:
        table = as_table(table.get(key, {}))
    return table
