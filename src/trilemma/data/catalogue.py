"""The two registries of the room, data sets and partitions, and the functions that use them by name.

A data set or a partition is a small frozen model: its fields are the options a user may set, validated; its
one method does the work. A configuration can therefore check `options` before anything is loaded, and what
was checked is what runs.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from trilemma.data.storage import Storage
from trilemma.data.types import Dataset, Holdings
from trilemma.errors import ConfigError, UserError, nearest
from trilemma.keys import Key
from trilemma.registry import Registry


class Options(BaseModel):
    """Options a user may set: frozen, and nothing else is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def parse(cls, **values: Any) -> Self:
        """Return validated options, or raise a `ConfigError` that says what is wrong and what is allowed.

        >>> from trilemma.data import partitions
        >>> partitions["dirichlet"].parse(alpha=-1)
        Traceback (most recent call last):
        trilemma.errors.ConfigError: alpha = -1: input should be greater than 0
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(cls._explain(dict(detail)) for detail in error.errors())) from None

    @classmethod
    def _explain(cls, detail: dict[str, Any]) -> str:
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            return f"unknown option {name!r}: {nearest(name, cls.model_fields)}"
        message = detail["msg"].removeprefix("Value error, ")
        if not name:
            return str(message)
        return f"{name} = {detail['input']!r}: {message[0].lower()}{message[1:]}"


class DatasetOptions(Options, abc.ABC):
    """A data set and its options."""

    @abc.abstractmethod
    def load(self, key: Key, storage: Storage) -> Dataset:
        """Return the data set; `key` feeds whatever is random, `storage` says where files are."""


class PartitionOptions(Options, abc.ABC):
    """A way of dividing the training examples among clients, and its options."""

    @abc.abstractmethod
    def divide(self, dataset: Dataset, clients: int, key: Key) -> Holdings:
        """Return who holds which examples; a pure function of its arguments."""


datasets: Registry[type[DatasetOptions]] = Registry("data set")
partitions: Registry[type[PartitionOptions]] = Registry("partition")


def load(name: str, *, key: Key, storage: Storage | Path | None = None, **options: Any) -> Dataset:
    """Load a data set by name. `storage` is a folder of npz files; default: what the environment says.

    >>> data = load("phishing", key=Key(1))
    >>> data.x_train.shape, data.x_test.shape
    (torch.Size([8400, 68]), torch.Size([2655, 68]))
    """
    if isinstance(storage, Path):
        storage = Storage.from_environment(directory=storage)
    return datasets[name].parse(**options).load(key, storage or Storage.from_environment())


def divide(name: str, dataset: Dataset, clients: int, *, key: Key, **options: Any) -> Holdings:
    """Divide a data set among `clients` by the partition called `name`.

    >>> data = load("phishing", key=Key(1))
    >>> [len(rows) for rows in divide("homogeneous", data, 4, key=Key(1)).train]
    [2100, 2100, 2100, 2100]
    """
    if clients < 1:
        raise UserError(f"{clients} clients: at least 1 is needed")
    return partitions[name].parse(**options).divide(dataset, clients, key)
