"""The registries of the room, data sets, partitions and feature maps, and functions that use them by name.

Each entry is a small frozen model: its fields are the options a user may set, validated; its one method does
the work. A configuration can therefore check `options` before anything is loaded, and what was checked is
what runs.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.base.options import Options
from trilemma.base.registry import Registry
from trilemma.data.storage import Storage
from trilemma.data.types import Dataset, Holdings

FeatureMap = Callable[[Tensor], Tensor]
"""Examples (b, …) -> features (b, …), each from its own example alone."""


class DatasetOptions(Options, abc.ABC):
    """A data set and its options."""

    usual_partition: ClassVar[str] = "homogeneous"
    """How the examples are divided where nothing is said."""

    @abc.abstractmethod
    def load(self, key: Key, storage: Storage) -> Dataset:
        """Return the data set; `key` feeds whatever is random, `storage` says where files are."""

    def origin(self, storage: Storage) -> Hashable | None:
        """Return what the data set comes from, where nothing in it is random: the same origin, the same data.

        None: it is loaded anew whenever it is asked for.
        """
        return None


class PartitionOptions(Options, abc.ABC):
    """A way of dividing the training examples among clients, and its options."""

    @abc.abstractmethod
    def divide(self, dataset: Dataset, clients: int, key: Key) -> Holdings:
        """Return who holds which examples; a pure function of its arguments."""


class FeatureOptions(Options, abc.ABC):
    """A frozen map from an example to its features, and its options."""

    @abc.abstractmethod
    def build(self, shape: tuple[int, ...]) -> FeatureMap:
        """Return the map for examples of `shape`; it learns nothing, and treats every example by itself."""


datasets: Registry[type[DatasetOptions]] = Registry("data set")
partitions: Registry[type[PartitionOptions]] = Registry("partition")
feature_maps: Registry[type[FeatureOptions]] = Registry("feature map")


def load(name: str, *, key: Key, storage: Storage | Path | None = None, **options: Any) -> Dataset:
    """Load a data set by name. `storage` is a folder of npz files; default: what the environment says.

    >>> data = load("phishing", key=Key(1))
    >>> data.x_train.shape, data.x_test.shape
    (torch.Size([8400, 68]), torch.Size([2655, 68]))
    """
    if isinstance(storage, Path):
        storage = Storage.from_environment(directory=storage)
    return datasets[name].parse(**options).load(key, storage or Storage.from_environment())


KEPT = 2
"""Data sets that a process keeps in memory, to be used again by its next seed or its next run."""


def loaded(options: DatasetOptions, key: Key, storage: Storage) -> Dataset:
    """Return a data set, from memory where this process has loaded the same one lately.

    >>> from trilemma.data.sets.phishing import Phishing
    >>> here = Storage.from_environment()
    >>> loaded(Phishing(), Key(1), here) is loaded(Phishing(), Key(2), here)
    True
    """
    origin = options.origin(storage)
    return options.load(key, storage) if origin is None else _kept(options, origin, storage)


@lru_cache(maxsize=KEPT)
def _kept(options: DatasetOptions, origin: Hashable, storage: Storage) -> Dataset:
    return options.load(Key(0), storage)  # nothing in it depends on the key


def divide(name: str, dataset: Dataset, clients: int, *, key: Key, **options: Any) -> Holdings:
    """Divide a data set among `clients` by the partition called `name`.

    >>> data = load("phishing", key=Key(1))
    >>> [len(rows) for rows in divide("homogeneous", data, 4, key=Key(1)).train]
    [2100, 2100, 2100, 2100]
    """
    if clients < 1:
        raise UserError(f"{clients} clients: at least 1 is needed")
    return partitions[name].parse(**options).divide(dataset, clients, key)
