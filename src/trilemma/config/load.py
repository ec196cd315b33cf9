"""From TOML text and `--set` overrides to a validated `Config`, with errors a person can act on."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError, create_model

from trilemma import attacks, data, learning, models
from trilemma.config.schema import (
    AggregationTable,
    DataTable,
    FederationTable,
    PrivacyTable,
    RunTable,
    Table,
)
from trilemma.data import DatasetOptions, PartitionOptions
from trilemma.errors import ConfigError, nearest
from trilemma.registry import Registry

Options = TypeVar("Options", bound=BaseModel)
AnyTable = TypeVar("AnyTable", bound=BaseModel)


@dataclass(frozen=True)
class Choice(Generic[Options]):
    """Something chosen by name, with its options."""

    name: str
    options: Options

    def dump(self) -> dict[str, Any]:
        """Return the choice as it stands in a configuration file."""
        return {"name": self.name, **_plain(self.options)}


@dataclass(frozen=True)
class Config:
    """A validated configuration. Immutable; `with_` returns changed copies."""

    data: Choice[DatasetOptions]
    holding: DataTable
    partition: Choice[PartitionOptions]
    model: Choice[BaseModel]
    federation: FederationTable
    algorithm: Choice[learning.AlgorithmSettings]
    aggregation: AggregationTable
    attack: Choice[attacks.AttackSettings]
    privacy: PrivacyTable
    run: RunTable
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def dump(self) -> dict[str, Any]:
        """Return the whole configuration, defaults included, as nested plain values."""
        return {
            "data": {**self.data.dump(), **_plain(self.holding), "partition": self.partition.dump()},
            "model": self.model.dump(),
            "federation": _plain(self.federation),
            "algorithm": self.algorithm.dump(),
            "aggregation": _plain(self.aggregation),
            "attack": self.attack.dump(),
            "privacy": _plain(self.privacy),
            "run": _plain(self.run),
        }

    def toml(self) -> str:
        """Return the configuration as TOML text that `parse` reads back."""
        return tomli_w.dumps(self.dump())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as plain values: options of models are classes made at run time, which cannot be pickled."""
        return parse, (self.dump(),)

    def with_(self, *assignments: str) -> Config:
        """Return a copy with `table.key=value` assignments applied."""
        return parse(self.source, assignments)


def load(path: Path | None, assignments: Iterable[str] = ()) -> Config:
    """Read a TOML file (None: all defaults), apply assignments, validate."""
    if path is None:
        return parse({}, assignments)
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {str(path)!r}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    return parse(raw, assignments)


def parse(raw: Mapping[str, Any], assignments: Iterable[str] = ()) -> Config:
    """Validate nested plain values, after applying `table.key=value` or `table={…}` assignments.

    >>> parse({}, ["federation.clients=9"]).federation.clients
    9
    >>> parse({"federation": {"clents": 9}})
    Traceback (most recent call last):
    trilemma.errors.ConfigError: [federation] unknown key 'clents': did you mean 'clients'? Allowed: ...
    """
    tables: dict[str, Any] = copy.deepcopy(dict(raw))
    for assignment in assignments:
        _assign(tables, assignment)

    problems: list[str] = []
    known = ("data", "model", "federation", "algorithm", "aggregation", "attack", "privacy", "run")
    for name in tables:
        if name not in known:
            problems.append(f"unknown table [{name}]: {nearest(name, known)}")
        elif not isinstance(tables[name], dict | str):
            problems.append(f"[{name}] must be a table, not {tables[name]!r}")
    if problems:
        raise ConfigError("\n".join(problems))

    data_table = {"name": "phishing"} | _as_table(tables.get("data", {}))
    partition = _as_table(data_table.pop("partition", {}))
    holding = {key: data_table.pop(key) for key in DataTable.model_fields if key in data_table}
    chosen = _choose(problems, "data", data.datasets, data_table, extra=DataTable)
    usual = "natural" if chosen is not None and chosen.name == "synthetic" else "homogeneous"

    parts: dict[str, Any] = {
        "data": chosen,
        "holding": _check(problems, "data", DataTable, holding),
        "partition": _choose(problems, "data.partition", data.partitions, {"name": usual} | partition),
    }
    named: dict[str, tuple[str, Registry[Any]]] = {
        "model": ("logistic", model_options()),
        "algorithm": ("dsgd", learning.algorithms),
        "attack": ("none", attacks.attacks),
    }
    for name, (default, registry) in named.items():
        table = {"name": default} | _as_table(tables.get(name, {}))
        parts[name] = _choose(problems, name, registry, table)
    plain: dict[str, type[Table]] = {
        "federation": FederationTable,
        "aggregation": AggregationTable,
        "privacy": PrivacyTable,
        "run": RunTable,
    }
    for name, schema in plain.items():
        parts[name] = _check(problems, name, schema, _as_table(tables.get(name, {})))
    if problems:
        raise ConfigError("\n".join(problems))
    return Config(**parts, source=tables)


def _assign(tables: dict[str, Any], assignment: str) -> None:
    path, equals, text = assignment.partition("=")
    *parents, key = path.strip().split(".")
    whole_table = not parents and text.strip().startswith("{")
    if not equals or not key or not (parents or whole_table):
        raise ConfigError(f"cannot read {assignment!r}; allowed: table.key=value, as in run.rounds=50")
    value: Any = text.strip()  # a bare word is a string, so that --set aggregation.rule=caf works
    if key != "name" or value[:1] in "\"'":  # and a name always is: TOML would read nan as a number
        with contextlib.suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
    table = tables
    for parent in parents:
        table[parent] = _as_table(table.get(parent, {}))
        table = table[parent]
    table[key] = value


def _as_table(value: Any) -> dict[str, Any]:
    """Read `partition = "dirichlet"` as `partition = {name = "dirichlet"}`."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict):
        raise ConfigError(f"expected a table or a name, not {value!r}")
    return dict(value)


def _choose(
    problems: list[str],
    where: str,
    registry: Registry[Any],
    table: dict[str, Any],
    extra: type[BaseModel] | None = None,
) -> Choice[Any] | None:
    """Look up `table["name"]` and validate the rest as its options."""
    name = table.pop("name", None)
    if not isinstance(name, str):
        problems.append(f"[{where}] needs a name. Allowed: {', '.join(sorted(registry))}")
        return None
    if name not in registry:
        problems.append(f"[{where}] unknown {registry.kind} {name!r}: {nearest(name, registry)}")
        return None
    options = _check(problems, where, registry[name], table, extra)
    return None if options is None else Choice(name, options)


def _check(
    problems: list[str],
    where: str,
    table: type[AnyTable],
    values: dict[str, Any],
    extra: type[BaseModel] | None = None,
) -> AnyTable | None:
    try:
        return table.model_validate(values)
    except ValidationError as error:
        allowed = [*table.model_fields, *(extra.model_fields if extra else ())]
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"])
            if detail["type"] == "extra_forbidden":
                problems.append(f"[{where}] unknown key {key!r}: {nearest(key, allowed)}")
            elif detail["type"] == "missing":
                problems.append(f"[{where}] needs {key}")
            elif detail["type"] == "literal_error":
                meant = nearest(str(detail["input"]), re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
                problems.append(f"[{where}] {key} = {detail['input']!r}: {meant}")
            elif key:
                problems.append(f"[{where}] {key} = {detail['input']!r}: {_message(detail['msg'])}")
            else:
                problems.append(f"[{where}] {_message(detail['msg'])}")
        return None


@functools.cache
def model_options() -> Registry[type[BaseModel]]:
    """Return, for every model, a table of the keyword options its builder takes."""
    registry: Registry[type[BaseModel]] = Registry("model")
    for name, builder in models.models.items():
        _, _, *parameters = inspect.signature(builder, eval_str=True).parameters.values()
        fields: dict[str, Any] = {p.name: (p.annotation, p.default) for p in parameters}
        options = create_model(name, __config__=Table.model_config, **fields)
        registry.register(name, models.models.summary(name))(options)
    return registry


def _message(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _plain(options: BaseModel) -> dict[str, Any]:
    """Dump without None: TOML has no word for it, and an absent key means the same."""
    return options.model_dump(mode="json", exclude_none=True)
