"""A configuration beside a task: the task brings data and model, and the configuration names neither.

Its tables then read `[data] name = "own"` and `[model] name = "own"`, so that a run's directory says what it
was, and so that whoever runs such a file without its task is told what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from pydantic import BaseModel

from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.data import Dataset, DatasetOptions, Storage
from trilemma.experiment.assign import Tables, as_table
from trilemma.models import Model, ModelOptions

OWN = "own"
"""What the data and the model of a task are called."""


class OwnData(DatasetOptions):
    """The data of a task."""

    usual_partition: ClassVar[str] = "natural"

    def load(self, key: Key, storage: Storage) -> Dataset:
        """Say that the task is missing."""
        _missing("data")


class OwnModel(ModelOptions):
    """The model of a task."""

    def build(self, shape: tuple[int, ...], classes: int) -> Model:
        """Say that the task is missing."""
        _missing("model")


OWNED: Mapping[str, type[BaseModel]] = {"data": OwnData, "model": OwnModel}
"""Which tables a task fills."""


@dataclass(frozen=True)
class Own:
    """What is known of a task when its configuration is read: its number of clients, or None."""

    clients: int | None = None

    def enter(self, tables: Tables) -> Iterator[str]:
        """Fill in what the task brings; yield what the configuration should not have said."""
        values = tables.values
        for where in OWNED:
            table = values[where] = as_table(values.get(where, {}))
            name = table.setdefault("name", OWN)
            if name != OWN:
                yield f"[{where}] name = {name!r}: the task brings its own {where}; leave it out"
        data = values["data"]
        said = {
            "partition": as_table(data.get("partition", {})).get("name", "natural"),
            "holders": data.setdefault("holders", "all"),
        }
        for key, allowed in (("partition", "natural"), ("holders", "all")):
            if said[key] != allowed:
                yield f"[data] {key} = {said[key]!r}: the task says what each client holds; leave it out"
        federation = values["federation"] = as_table(values.get("federation", {}))
        if self.clients is None and "clients" not in federation:
            yield (
                "[federation] needs clients: the task does not say how many there are; give it here, or as "
                "clients = … in its file"
            )
        if self.clients is not None and federation.setdefault("clients", self.clients) != self.clients:
            yield (
                f"[federation] clients = {federation['clients']}: the task has {self.clients}; leave it out"
            )


def _missing(what: str) -> NoReturn:
    raise ConfigError(f"[{what}] name = {OWN!r}: the {what} is a task's; give it with --task task.py")
