"""From TOML text and `--set` overrides to a validated `Config`, with errors a person can act on."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from trilemma import aggregation, attacks, data, learning, models
from trilemma.base.errors import ConfigError, nearest
from trilemma.base.options import describe, mistakes
from trilemma.base.plugins import Plugin, installed
from trilemma.base.plugins import load as load_plugins
from trilemma.base.registry import Registry
from trilemma.data import DatasetOptions, FeatureOptions, PartitionOptions
from trilemma.experiment import auto
from trilemma.experiment.assign import Assignment, Tables
from trilemma.experiment.own import OWN, OWNED, Own
from trilemma.experiment.ready import ready
from trilemma.experiment.schema import (
    AUTO,
    AggregationTable,
    DataTable,
    EvaluationTable,
    FederationTable,
    ModelTable,
    PrivacyTable,
    RunTable,
    SettingsTable,
)
from trilemma.privacy.accounting.accountants import accountants

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
    """A validated configuration. Immutable; `with_` returns changed copies.

    `auto` names the keys that are still to be chosen from public numbers (`auto.settled`), whose values mean
    nothing until then. `notes` says what assignments made of the file: the options that went with a thing
    they replaced.
    """

    data: Choice[DatasetOptions]
    holding: DataTable
    partition: Choice[PartitionOptions]
    features: Choice[FeatureOptions]
    model: Choice[models.ModelOptions]
    coordinates: ModelTable
    federation: FederationTable
    algorithm: Choice[learning.AlgorithmSettings]
    aggregation: AggregationTable
    attack: Choice[attacks.AttackSettings]
    privacy: PrivacyTable
    evaluation: EvaluationTable
    run: RunTable
    plugins: tuple[Plugin, ...] = ()
    auto: frozenset[str] = frozenset()
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def dump(self) -> dict[str, Any]:
        """Return the whole configuration, defaults included, as nested plain values."""
        tables: dict[str, Any] = {
            "data": {
                **self.data.dump(),
                **_plain(self.holding),
                "partition": self.partition.dump(),
                "features": self.features.dump(),
            },
            "model": {**self.model.dump(), **_plain(self.coordinates)},
            "federation": _plain(self.federation),
            "algorithm": self.algorithm.dump(),
            "aggregation": _plain(self.aggregation),
            "attack": self.attack.dump(),
            "privacy": _plain(self.privacy),
            "run": _plain(self.run),
        }
        if self.evaluation != EvaluationTable():
            tables["evaluation"] = _plain(self.evaluation)
        for path in self.auto:
            table, key = path.split(".")
            tables[table][key] = AUTO
        # A file is named by its name and digest alone: a copy of it lies beside the configuration.
        return {"plugins": [one.reference for one in self.plugins], **tables} if self.plugins else tables

    def toml(self) -> str:
        """Return the configuration as TOML text that `parse` reads back."""
        return tomli_w.dumps(self.dump())

    def with_(self, *assignments: str) -> Config:
        """Return a copy with `table.key=value` assignments applied."""
        changed = parse(self.source, assignments)
        return replace(changed, notes=tuple(dict.fromkeys((*self.notes, *changed.notes))))


def load(
    path: Path | str | None,
    assignments: Iterable[str] = (),
    own: Own | None = None,
    plugins: Iterable[str] = (),
) -> Config:
    """Read a TOML file, or a configuration that comes with the package, by name; None: all defaults.

    Files of plugins that the TOML file names are found beside it; `plugins` names further ones.

    >>> load("cafcor-mnist", ["federation.byzantine=10"]).federation.f
    10
    """
    return parse(read_tables(path, plugins), assignments, own)


def read_tables(path: Path | str | None, plugins: Iterable[str] = ()) -> dict[str, Any]:
    """Read what a file says, not validated; its plugins and further ones are loaded and located."""
    raw = {} if path is None else _read(Path(path))
    named = load_plugins(_named_plugins(raw), None if path is None else Path(path).parent)
    further = load_plugins(plugins)
    return {**raw, "plugins": [one.located for one in (*named, *further)]}


def _read(path: Path) -> dict[str, Any]:
    """Return what a TOML file says, or a ready configuration of that name."""
    if not path.is_file():
        installed()
    if not path.is_file() and str(path) in ready:
        return tomllib.loads(ready[str(path)].text)
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        known = nearest(path.name.removesuffix(".toml"), ready, listed_by="trilemma list configs")
        raise ConfigError(
            f"there is no configuration file {str(path)!r}, and no ready configuration of that name: {known}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        task = f"; a task is given with --task {path}" if path.suffix == ".py" else ""
        raise ConfigError(f"{str(path)!r} is not a TOML file: {error}{task}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None


def parse(raw: Mapping[str, Any], assignments: Iterable[Assignment] = (), own: Own | None = None) -> Config:
    """Validate nested plain values, after applying `table.key=value` or `table={…}` assignments.

    `own` is what a task brings, which `[data]` and `[model]` then do not name.

    Where an assignment replaces a thing (`attack.name=sf`), options of the old one that the new one does not
    have are left out; `notes` of the result says which.

    >>> parse({}, ["federation.clients=9"]).federation.clients
    9
    >>> parse({"attack": {"name": "alie", "strength": 1.5}}, ["attack.name=sf"]).notes
    ('[attack] strength = 1.5 is left out: alie has it, sf does not',)
    >>> parse({"federation": {"clents": 9}})
    Traceback (most recent call last):
    trilemma.base.errors.ConfigError: [federation] unknown key 'clents': did you mean 'clients'? Allowed: ...
    """
    plugins = load_plugins(_named_plugins(raw))
    tables = Tables.read({key: value for key, value in raw.items() if key != "plugins"}, assignments)
    asked = auto.taken(tables.values)
    from_packages = installed()
    problems = _unknown(tables)
    if not problems and own is not None:
        problems += own.enter(tables)
    if problems:
        raise ConfigError("\n".join(problems))
    parts = _parts(problems, tables)
    if problems:
        raise ConfigError("\n".join(problems))
    wanted: PrivacyTable = parts["privacy"]
    if wanted.aims and "delta" not in wanted.model_fields_set:
        tables.notes.append(DELTA_UNSAID.format(wanted.delta))
    config = auto.begun(Config(**parts, notes=tuple(tables.notes)), asked)
    used = [one for one in from_packages if one.entries & _names(config) and one not in plugins]
    auto.put_back(tables.values, asked)
    source = {**tables.values, "plugins": [plugin.located for plugin in plugins]}
    return replace(config, plugins=(*plugins, *used), source=source)


def _unknown(tables: Tables) -> list[str]:
    """Return what is wrong with the names of tables, and with what is no table."""
    problems, known = list[str](), ("data", *CHOSEN, *PLAIN)
    for name, value in tables.values.items():
        if name == "sweep":
            problems.append("[sweep] says many runs: use trilemma sweep FILE, or leave the table out")
        elif name not in known:
            problems.append(f"unknown table [{name}]: {nearest(name, known)}")
        elif not isinstance(value, dict | str):
            problems.append(f"[{name}] must be a table, not {value!r}")
    return problems


def _parts(problems: list[str], tables: Tables) -> dict[str, Any]:
    """Return every table, validated, as fields of `Config`; what is wrong is added to `problems`."""
    chosen = _choose(problems, tables, "data", data.datasets, USUAL_DATA)
    usual = DatasetOptions.usual_partition if chosen is None else chosen.options.usual_partition
    parts: dict[str, Any] = {
        "data": chosen,
        "holding": _beside(problems, tables, "data"),
        "partition": _choose(problems, tables, "data.partition", data.partitions, usual),
        "features": _choose(problems, tables, "data.features", data.feature_maps, "none"),
        "coordinates": _beside(problems, tables, "model"),
    }
    for name, (default, registry) in CHOSEN.items():
        parts[name] = _choose(problems, tables, name, registry, default)
    for name, schema in PLAIN.items():
        parts[name] = _check(problems, name, schema, tables.part(name))
    if not problems:
        parts["run"] = _rounds(problems, parts["algorithm"], parts["run"])
    return parts


def _rounds(problems: list[str], algorithm: Choice[learning.AlgorithmSettings], run: RunTable) -> RunTable:
    """Return how long a run is, where its algorithm leaves no choice."""
    rounds = algorithm.options.rounds
    if rounds is None or run.rounds == rounds:
        return run
    if "rounds" in run.model_fields_set:
        problems.append(f"[run] rounds = {run.rounds}: {algorithm.name} has {rounds}; leave it out")
    return run.model_copy(update={"rounds": rounds})


DELTA_UNSAID = (
    "[privacy] delta = {:g}, as nothing is said: the chance that the promise fails; keep it below one over "
    "the number of records, as 1/m^1.1 is"
)
"""What is said of the default δ."""


def _named_plugins(raw: Mapping[str, Any]) -> list[str]:
    named = raw.get("plugins", [])
    if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
        raise ConfigError(f"plugins = {named!r}: allowed is a list of files and modules")
    return named


def _names(config: Config) -> set[tuple[str, str]]:
    """Return the kinds and names of everything a configuration uses."""
    chosen: list[tuple[Registry[Any], str]] = [
        (data.datasets, config.data.name),
        (data.partitions, config.partition.name),
        (data.feature_maps, config.features.name),
        (models.models, config.model.name),
        (learning.algorithms, config.algorithm.name),
        (attacks.attacks, config.attack.name),
        (accountants, config.privacy.accountant or ""),
    ]
    steps = [step.partition("(")[0].strip() for step in config.aggregation.rule.split("+")]
    chosen += [(registry, step) for registry in (aggregation.rules, aggregation.mixings) for step in steps]
    return {(registry.kind, name) for registry, name in chosen}


USUAL_DATA = "phishing"
"""The data set where nothing is said: it ships with the package."""

CHOSEN: dict[str, tuple[str, Registry[Any]]] = {
    "model": ("logistic", models.models),
    "algorithm": ("dsgd", learning.algorithms),
    "attack": ("none", attacks.attacks),
}
"""Tables that choose something by name: what is chosen where nothing is said, and among what."""

BESIDE: dict[str, type[SettingsTable]] = {"data": DataTable, "model": ModelTable}
"""Keys that stand in the table of something chosen by name, whatever is chosen."""

PLAIN: dict[str, type[SettingsTable]] = {
    "federation": FederationTable,
    "aggregation": AggregationTable,
    "privacy": PrivacyTable,
    "evaluation": EvaluationTable,
    "run": RunTable,
}
"""Tables whose keys are always the same."""


def _choose(
    problems: list[str],
    tables: Tables,
    where: str,
    registry: Registry[Any],
    default: str,
) -> Choice[Any] | None:
    """Look up the name at `where` and validate the rest, less the keys `BESIDE`, as its options."""
    name = tables.part(*where.split(".")).get("name", default)
    if not isinstance(name, str):
        problems.append(f"[{where}] needs a name. Allowed: {', '.join(sorted(registry))}")
        return None
    if name == OWN and where in OWNED:
        return Choice(name, OWNED[where]())
    if name not in registry:
        problems.append(f"[{where}] unknown {registry.kind} {name!r}: {nearest(name, registry)}")
        return None
    before = tables.name_before(where, default)
    if before in registry:
        tables.shed(where, default, registry[before].model_fields, registry[name].model_fields)
    beside = BESIDE.get(where)
    inside = {"partition", "features"} if where == "data" else set()
    others = {"name", *(beside.model_fields if beside else ()), *inside}
    given = {key: value for key, value in tables.part(*where.split(".")).items() if key not in others}
    options = _check(problems, where, registry[name], given, beside)
    return None if options is None else Choice(name, options)


def _beside(problems: list[str], tables: Tables, where: str) -> SettingsTable | None:
    """Validate the keys that stand beside the options of the thing chosen at `where`."""
    table = BESIDE[where]
    given = {key: value for key, value in tables.part(where).items() if key in table.model_fields}
    return _check(problems, where, table, given)


def _check(
    problems: list[str],
    where: str,
    table: type[AnyTable],
    values: dict[str, Any],
    beside: type[BaseModel] | None = None,
) -> AnyTable | None:
    try:
        return table.model_validate(values)
    except ValidationError as error:
        allowed = [option.name for one in (table, beside) if one is not None for option in describe(one)]
        problems += [f"[{where}] {mistake}" for mistake in mistakes(error, allowed)]
        return None


def _plain(options: BaseModel) -> dict[str, Any]:
    """Dump without None: TOML has no word for it, and an absent key means the same."""
    return options.model_dump(mode="json", exclude_none=True)
