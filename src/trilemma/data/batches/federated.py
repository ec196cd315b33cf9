"""Stacked batches: a data set and its holders on one device, batches for any k clients at once.

Client i draws from `key.fold("client", i)` and from nothing else, so a batch drawn for client i alone equals
its row in a batch drawn for all. Where the holders are but a part of a federation, `first` is the number of
the first: holder i then draws as client first + i. Indices are drawn on the CPU; features move once, in one
gather.

How many examples a client holds may depend on its records (a split by each record's hash does that), and what
the accountant knows may not. So `least`, a public number, is what every client counts as holding: one that
holds fewer draws from that many places, and the empty ones weigh nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data.batches.streams import drawn_each, each_stream
from trilemma.data.types import IGNORED, Augment, Batch, Dataset, Features, Holdings, each

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class _Held:
    """One split of all clients end to end: slot offsets[i] + j is client i's j-th example.

    Labels belong to slots, not to examples: an example that two clients hold can have two labels.
    """

    x: Features
    rows: Tensor
    labels: Tensor
    sizes: np.ndarray
    offsets: np.ndarray
    real: np.ndarray | None = None
    """Which slots count; None: all."""

    @staticmethod
    def of(x: Features, y: Tensor, held: Sequence[np.ndarray], left_out: Tensor | None = None) -> _Held:
        rows = torch.from_numpy(np.concatenate([*held, np.empty(0, np.int64)]).astype(np.int64)).to(y.device)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(y):
            raise UserError(f"holdings name examples outside 0 … {len(y) - 1}")
        sizes = np.array([len(indices) for indices in held], dtype=np.int64)
        real = None if left_out is None else ~left_out.numpy()[rows.numpy(force=True)]
        return _Held(x, rows, y[rows], sizes, np.concatenate([[0], np.cumsum(sizes)[:-1]]), real)

    def count(self, slots: np.ndarray, present: np.ndarray) -> np.ndarray:
        """Return which of the slots that are `present` count."""
        return present if self.real is None else present & self.real[slots]

    def gather(self, slots: np.ndarray) -> tuple[Features, Tensor]:
        # What is already under way on a GPU need not end first.
        where = torch.from_numpy(slots).to(self.rows.device, non_blocking=True)
        rows = self.rows[where]

        def chosen(column: Tensor) -> Tensor:
            # index_select copies whole rows, several times faster on a CPU than the equal column[rows].
            return column.index_select(0, rows.flatten()).view(*rows.shape, *column.shape[1:])

        return each(self.x, chosen), self.labels[where]


class FederatedData:
    """Who holds what, ready to be drawn from.

    >>> from trilemma.data import divide, load
    >>> data = load("phishing", key=Key(1))
    >>> fed = FederatedData(data, divide("homogeneous", data, 4, key=Key(1)))
    >>> batch = fed.sample((0, 2), 25, Key(1).fold("round", 0))
    >>> batch.x.shape, batch.y.shape
    (torch.Size([2, 25, 68]), torch.Size([2, 25]))
    >>> alone = fed.sample((2,), 25, Key(1).fold("round", 0))
    >>> bool((alone.x[0] == batch.x[1]).all())
    True
    """

    def __init__(
        self,
        dataset: Dataset,
        holdings: Holdings,
        device: torch.device | str = "cpu",
        first: int = 0,
        least: int | None = None,
    ) -> None:
        empty = [i for i, rows in enumerate(holdings.train) if not len(rows)]
        if empty:
            raise UserError(f"client {empty[0]} holds no training examples; every client needs at least one")
        if {len(holdings.valid), len(holdings.test)} - {0, holdings.clients}:
            raise UserError("validation and test examples must be given for every client or for none")
        self.dataset = dataset.to(device)
        self.holdings = holdings
        self.first = first
        self.least = least
        data = self.dataset
        self._splits: dict[Split, _Held] = {
            "train": _Held.of(data.x_train, data.y_train, holdings.train, data.left_out),
            "valid": _Held.of(data.x_train, data.y_train, holdings.valid),
            "test": _Held.of(data.x_test, data.y_test, holdings.test),
        }

    @property
    def clients(self) -> int:
        """Number of clients."""
        return self.holdings.clients

    @property
    def sizes(self) -> np.ndarray:
        """Number of places from which each client draws training examples, (n,): no fewer than `least`."""
        found: np.ndarray = np.maximum(self._splits["train"].sizes, self.least or 0)
        return found

    def poorest(self, ids: Sequence[int]) -> int:
        """Return how many training examples each of some clients counts as holding at least.

        That is `least` where it was said, whatever they hold; else the fewest that one of them holds.
        """
        return self.least or int(self.sizes[list(ids)].min())

    @property
    def held_out(self) -> int:
        """Number of validation examples that every client has at least; 0 where there are none."""
        return int(self._splits["valid"].sizes.min()) if self.holdings.valid else 0

    def sample(self, ids: Sequence[int], size: int, key: Key) -> Batch:
        """Draw `size` training examples without replacement for each of the clients `ids`.

        An empty place that is drawn has weight 0; the others keep their weight 1/size.

        Raises:
            UserError: A client has fewer than `size` places.
        """
        held = self._training(ids, size)
        sizes = self.sizes[list(ids)].tolist()
        if min(sizes) < size:
            short = next(i for i in ids if self.sizes[i] < size)
            raise UserError(
                f"batch size {size} exceeds the {self.sizes[short]} training examples of client {short}; "
                f"allowed: 1 to {self.sizes.min()}, the size of the smallest client"
            )
        chosen = drawn_each(key.integers("client", (self.first + i for i in ids)), sizes, size)
        present = chosen < held.sizes[list(ids), None]
        slots = held.offsets[list(ids), None] + chosen * present
        (x, y), present = held.gather(slots), held.count(slots, present)
        weight = None if present.all() else self._tensor(present / size)
        return Batch(self._augmented(x, ids, key), y, weight)

    def poisson(self, ids: Sequence[int], rate: float, size: int, key: Key) -> Batch:
        """Draw each training example of each client independently with probability `rate`.

        Width and weights, 1/`size`, are public constants; empty places have weight 0. Neither the size that
        was drawn nor the number m_i of examples held may be in them: both are private, and an example that
        comes or goes would move the share of every other one, or change the shape in which that is computed
        and so its rounding. So the sensitivity of the weighted sum is clip/`size`, as the Poisson accountants
        assume. A larger draw than there are `places` for doubles the width.
        """
        if not 0 < rate <= 1:
            raise UserError(f"sampling rate {rate:g}: allowed are 0 < rate ≤ 1")
        held = self._training(ids, size)
        draws = []
        for i, rng in zip(ids, each_stream(key.fold("client", self.first + i) for i in ids), strict=True):
            # The number of successes, then which: the same law as one coin per example, in O(batch).
            draws.append(rng.choice(held.sizes[i], rng.binomial(held.sizes[i], rate), replace=False))
        width = places(size)
        while width < max(map(len, draws)):
            width *= 2
        slots, present = _pack(held.offsets[list(ids)], draws, width)
        x, y = held.gather(slots)
        weight = self._tensor(held.count(slots, present) / size)
        return Batch(self._augmented(x, ids, key), y, weight)

    def epoch_batches(
        self, ids: Sequence[int], size: int, steps: int, key: Key, start: int = 0
    ) -> EpochBatches:
        """Return `steps` batches as a shuffling loader gives them, from its step `start` on.

        A client's examples are shuffled, cut into batches of `size`, the last one smaller, and shuffled anew
        when they are used up. The order depends on `key` and the client's epoch only: with the same key, the
        batches from `start` = s on continue those before s, without any state being kept.
        """
        if steps < 0 or start < 0:
            raise UserError(f"steps = {steps}, start = {start}: both must be at least 0")
        held = self._training(ids, size)
        sizes = held.sizes[list(ids)].tolist()
        width = min(size, max(sizes))
        slots = np.empty((steps, len(ids), width), dtype=np.int64)
        counts = np.empty((steps, len(ids)), dtype=np.int64)
        for k, (i, m) in enumerate(zip(ids, sizes, strict=True)):
            drawn, counts[:, k] = _shuffled(
                m, size, range(start, start + steps), key.fold("client", self.first + i)
            )
            slots[:, k] = held.offsets[i] + drawn[:, :width]
        present = held.count(slots, np.arange(width) < counts[..., None])
        return EpochBatches(self, slots, present, tuple(ids), key, start)

    def everything(self, ids: Sequence[int], split: Split = "train") -> Batch:
        """Return all examples of each client, padded with weight 0 to the largest.

        Where clients have no test examples of their own, each gets the whole test set (shared memory).
        """
        self._check(ids)
        held = self._splits[split]
        if not len(held.sizes):
            if split == "valid":
                raise UserError(
                    "this partition gives clients no validation examples; shards and natural partitions do"
                )
            x, y = self.dataset.x_test, self.dataset.y_test
            weight = self._tensor(np.full((len(ids), len(y)), 1 / max(1, len(y))))

            def shared(column: Tensor) -> Tensor:
                return column.expand(len(ids), *column.shape)

            return Batch(each(x, shared), shared(y), weight)
        sizes = held.sizes[list(ids)]
        draws = [np.arange(m) for m in sizes]
        # An empty client at the very end has no slot of its own to repeat: the last slot stands in.
        first = np.minimum(held.offsets[list(ids)], max(0, len(held.rows) - 1))
        slots, present = _pack(first, draws, width=max(1, *sizes.tolist()))
        x, y = held.gather(slots)
        return Batch(x, y, self._tensor(held.count(slots, present) / np.maximum(1, sizes)[:, None]))

    def with_labels(self, ids: Sequence[int], relabel: Callable[[Tensor, int], Tensor]) -> FederatedData:
        """Return the same data where client i of `ids` trains on the labels `relabel(labels, i)`.

        Other clients keep their labels, also of examples they share with a relabelled client; tokens without
        a label (`IGNORED`) stay without one.

        >>> from trilemma.data import divide, load
        >>> data = load("phishing", key=Key(1))
        >>> fed = FederatedData(data, divide("homogeneous", data, 4, key=Key(1)))
        >>> liar = fed.with_labels([3], lambda labels, client: 1 - labels)
        >>> (fed.everything([3]).y + liar.everything([3]).y).unique().tolist()
        [1]
        """
        self._check(ids)
        held, classes = self._splits["train"], self.dataset.classes
        labels = held.labels.clone()
        for i in ids:
            mine = slice(int(held.offsets[i]), int(held.offsets[i] + held.sizes[i]))
            old = labels[mine]
            new = relabel(old.clone(), i)
            if new.shape != old.shape:
                raise UserError(f"client {i}: {tuple(new.shape)} new labels for {held.sizes[i]} examples")
            if classes is not None:
                new = torch.where(old == IGNORED, old, new)
                if bool(((new < 0) | (new >= classes))[old != IGNORED].any()):
                    raise UserError(f"client {i}: new labels must lie in 0 … {classes - 1}")
            labels[mine] = new
        other = copy.copy(self)
        other._splits = {**self._splits, "train": replace(held, labels=labels)}
        return other

    def _training(self, ids: Sequence[int], size: int) -> _Held:
        self._check(ids)
        if size < 1:
            raise UserError(f"batch size {size}: at least 1 is needed")
        return self._splits["train"]

    def _check(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise UserError("no clients were named; at least one is needed")
        wrong = [i for i in ids if not 0 <= i < self.clients]
        if wrong:
            raise UserError(f"client {wrong[0]} does not exist; allowed: 0 to {self.clients - 1}")

    def _augmented(self, x: Features, ids: Sequence[int], key: Key) -> Features:
        augment: Augment | None = self.dataset.augment
        return augment(x, [key.fold("client", self.first + i, "augment") for i in ids]) if augment else x

    def _tensor(self, weight: np.ndarray) -> Tensor:
        return torch.from_numpy(weight.astype(np.float32)).to(self.dataset.y_train.device, non_blocking=True)


class EpochBatches(Sequence[Batch]):
    """Batches of a shuffling loader, one (k, b) batch per step; features are gathered when a step is read."""

    def __init__(
        self,
        data: FederatedData,
        slots: np.ndarray,
        present: np.ndarray,
        ids: tuple[int, ...],
        key: Key,
        start: int,
    ) -> None:
        self._data, self._slots, self._present = data, slots, present
        self._ids, self._key, self._start = ids, key, start

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, step: int) -> Batch: ...
    @overload
    def __getitem__(self, step: slice) -> list[Batch]: ...
    def __getitem__(self, step: int | slice) -> Batch | list[Batch]:
        if isinstance(step, slice):
            return [self[index] for index in range(*step.indices(len(self)))]
        step = range(len(self))[step]
        x, y = self._data._splits["train"].gather(self._slots[step])
        present = self._present[step]
        key = self._key.fold("step", self._start + step)
        # Without padding every example weighs the same, and models need not look for any.
        shares = present / np.maximum(1, present.sum(axis=1, keepdims=True))
        weight = None if present.all() else self._data._tensor(shares)
        return Batch(self._data._augmented(x, self._ids, key), y, weight)

    def __iter__(self) -> Iterator[Batch]:
        return (self[step] for step in range(len(self)))


def _shuffled(examples: int, size: int, steps: range, key: Key) -> tuple[np.ndarray, np.ndarray]:
    """Return what one client's loader gives out in some steps, (steps, size), and how much of it is real.

    Every epoch is shuffled from a key of its own, and its last batch filled up with example 0.

    >>> drawn, counts = _shuffled(5, 2, range(6), Key(1))
    >>> counts.tolist(), sorted(drawn[:3].flatten()[:5].tolist()), drawn[5].tolist()[1]
    ([2, 2, 1, 2, 2, 1], [0, 1, 2, 3, 4], 0)
    """
    per_epoch = math.ceil(examples / size)
    epochs = range(steps.start // per_epoch, -(-steps.stop // per_epoch))
    order = np.zeros((len(epochs), per_epoch * size), dtype=np.int64)
    for row, epoch in zip(order, epochs, strict=True):
        row[:examples] = key.fold("epoch", epoch).numpy().permutation(examples)
    batch = np.arange(steps.start, steps.stop)
    counts = np.minimum(size, examples - size * (batch % per_epoch))
    return order.reshape(-1, size)[batch - epochs.start * per_epoch], counts


def places(size: int) -> int:
    """Return how many places a Poisson batch has of which `size` examples are expected.

    A draw with a rate r from m examples, rm ≤ `size`, has more with a probability below 1e-14, as Chernoff's
    bound of a Poisson law says. Who holds more than was agreed may need more.

    >>> [places(size) for size in (1, 25, 100, 1000)]
    [25, 81, 196, 1269]
    """
    return size + math.ceil(8 * math.sqrt(size)) + 16


def _pack(first: np.ndarray, draws: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `width` slots per draw and which of them are real; padding repeats the slot `first`."""
    slots = np.repeat(first[:, None], width, axis=1)
    for row, drawn in zip(slots, draws, strict=True):
        row[: len(drawn)] += drawn
    counts = np.array([len(drawn) for drawn in draws])
    return slots, np.arange(width) < counts[:, None]
