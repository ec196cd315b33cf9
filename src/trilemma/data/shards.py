"""Classes-per-client shards: the partition of the lp-proj experiments, with validation and test examples.

Per class, in the order of the data set, the training images are cut into q contiguous shards whose sizes
differ by at most one, larger ones first, and so are the test images. For clients 0, 1, … in turn, c classes
are drawn at random among those with the most shards left, and the client gets the last training shard and the
last test shard of each. The last fifth (rounded down) of a training shard is for validation. A client's mix
of classes is thus the same in training, validation and test. q = clients · c / classes: all shards are used.

Reference: Lin, Han, Li, Zhang, "Personalized federated learning towards communication efficiency,
robustness and fairness", NeurIPS 2022, and its code.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data.catalogue import PartitionOptions, partitions
from trilemma.data.types import Dataset, Holdings


@partitions.register("shards")
class Shards(PartitionOptions):
    """Each client gets shards of a few classes, with its own validation and test examples.

    >>> from trilemma.data import divide, load
    >>> data = load("phishing", key=Key(1))
    >>> held = divide("shards", data, 4, key=Key(1), classes_per_client=1)
    >>> [(len(train), len(valid), len(test)) for train, valid, test in
    ...  zip(held.train, held.valid, held.test)]
    [(1490, 372, 586), (1870, 467, 741), (1871, 467, 741), (1491, 372, 587)]
    """

    classes_per_client: int = Field(default=2, ge=1)
    """Number of classes each client holds."""
    variant: Literal["equal", "random"] = "random"
    """`equal`: every class is first cut to one less than the smallest class; `random`: all is used."""
    valid_fraction: float = Field(default=0.2, ge=0, lt=1)
    """Share of each training shard that is for validation, rounded down."""

    def divide(self, dataset: Dataset, clients: int, key: Key) -> Holdings:
        """Return training, validation and test examples of each client."""
        labels = dataset.class_labels("partition 'shards'")
        classes = dataset.needs_classes("partition 'shards'")
        per_class = self._shards_per_class(classes, clients)
        train_shards = self._train_shards(labels, classes, per_class)
        test_shards = _cut(_rows_by_class(dataset.y_test.numpy(force=True), classes), per_class)
        held = Holdings([], [], [])
        for chosen in _choices(classes, per_class, self.classes_per_client, clients, key):
            train, valid, test = [], [], []
            for label in chosen:
                shard = train_shards[label].pop()
                kept = len(shard) - int(self.valid_fraction * len(shard))
                train.append(shard[:kept])
                valid.append(shard[kept:])
                test.append(test_shards[label].pop())
            held.train.append(np.concatenate(train))
            held.valid.append(np.concatenate(valid))
            held.test.append(np.concatenate(test))
        return held

    def _shards_per_class(self, classes: int, clients: int) -> int:
        if self.classes_per_client > classes:
            raise UserError(
                f"classes_per_client = {self.classes_per_client}: the data set has {classes} classes; "
                f"allowed: 1 to {classes}"
            )
        per_class, left = divmod(clients * self.classes_per_client, classes)
        if left:
            step = classes // np.gcd(classes, self.classes_per_client)
            raise UserError(
                f"shards: {clients} clients × {self.classes_per_client} classes each cannot be dealt evenly "
                f"from {classes} classes; allowed with {self.classes_per_client} classes per client: "
                f"multiples of {step} clients"
            )
        return per_class

    def _train_shards(self, labels: np.ndarray, classes: int, per_class: int) -> list[list[np.ndarray]]:
        rows = _rows_by_class(labels, classes)
        smallest = min(len(of_class) for of_class in rows)
        if self.variant == "equal":
            rows = [of_class[: smallest - 1] for of_class in rows]
            smallest -= 1
        if smallest < per_class:
            raise UserError(
                f"shards: a class of {max(0, smallest)} usable training examples cannot be cut into "
                f"{per_class} shards; use fewer clients or fewer classes per client"
            )
        return _cut(rows, per_class)


def _rows_by_class(labels: np.ndarray, classes: int) -> list[np.ndarray]:
    return [np.flatnonzero(labels == label) for label in range(classes)]


def _cut(rows: list[np.ndarray], pieces: int) -> list[list[np.ndarray]]:
    return [list(np.array_split(of_class, pieces)) for of_class in rows]


def _choices(classes: int, per_class: int, wanted: int, clients: int, key: Key) -> list[list[int]]:
    """Return each client's classes: at random among those with the most shards left, then the next level."""
    rng = key.fold("shards").numpy()
    left = np.full(classes, per_class)
    choices = []
    for _ in range(clients):
        # A random order, then a stable sort by shards left: ties are broken at random, fuller classes first.
        order = rng.permutation(classes)
        chosen = order[np.argsort(-left[order], kind="stable")][:wanted]
        left[chosen] -= 1
        choices.append(chosen.tolist())
    return choices
