"""Dividing the training examples among clients: evenly at random, by Dirichlet shares, by label, or between.

Each partition here uses every training example exactly once and leaves no client empty; clients are tested
on the whole test set. Classes-per-client shards are in `trilemma.data.shards`.

References: Dirichlet shares: Hsu, Qi, Brown, arXiv:1909.06335 (2019); γ-similarity: Karimireddy et al.,
SCAFFOLD, ICML 2020, §7.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data.catalogue import PartitionOptions, partitions
from trilemma.data.types import Dataset, Holdings, columns_of

REDRAWS = 1000
"""How often a Dirichlet draw that leaves a client too small is drawn again before giving up."""


@partitions.register("homogeneous")
class Homogeneous(PartitionOptions):
    """Shuffled and dealt out evenly: every client sees the same distribution."""

    def divide(self, dataset: Dataset, clients: int, key: Key) -> Holdings:
        """Return sizes that differ by at most one, larger ones first."""
        examples = _examples_for(dataset, clients)
        return _train_only(np.array_split(key.fold("homogeneous").numpy().permutation(examples), clients))


@partitions.register("extreme")
class Extreme(PartitionOptions):
    """Sorted by label and cut into even pieces: a client sees one or two labels."""

    def divide(self, dataset: Dataset, clients: int, key: Key) -> Holdings:
        """Return contiguous pieces of the examples in order of label; nothing is random."""
        _examples_for(dataset, clients)
        return _train_only(np.array_split(_by_label(dataset, "extreme"), clients))


@partitions.register("gamma-similarity")
class GammaSimilarity(PartitionOptions):
    """A share gamma of the examples is dealt out at random, the rest sorted by label.

    gamma = 1 is homogeneous, gamma = 0 extreme. All clients hold equally many examples, up to one.
    """

    gamma: float = Field(ge=0, le=1)
    """Share of the examples that is dealt out at random."""

    def divide(self, dataset: Dataset, clients: int, key: Key) -> Holdings:
        """Return even sizes, each made of a random part and a sorted part."""
        examples = _examples_for(dataset, clients)
        order = key.fold("gamma_similarity").numpy().permutation(examples)
        alike = order[: int(self.gamma * examples)]
        rest = np.zeros(examples, dtype=bool)
        rest[order[len(alike) :]] = True
        by_label = _by_label(dataset, "gamma-similarity")
        # The sorted part fills every client up to its even share, so that odd remainders leave nobody empty.
        fill = _even(examples, clients) - _even(len(alike), clients)
        sorted_part = np.split(by_label[rest[by_label]], np.cumsum(fill)[:-1])
        random_part = np.array_split(alike, clients)
        return _train_only([np.concatenate(parts) for parts in zip(random_part, sorted_part, strict=True)])


@partitions.register("dirichlet")
class Dirichlet(PartitionOptions):
    """Each label is divided by shares drawn from a symmetric Dirichlet(alpha): small alpha, few labels each.

    A draw that leaves a client fewer than `minimum` examples is drawn again, up to 1,000 times.
    """

    alpha: float = Field(gt=0)
    """Concentration: 0.1 is very uneven, 1 uneven, large values approach even shares."""
    minimum: int = Field(default=1, ge=1)
    """Examples every client must get; set it to the batch size to make every draw of a batch possible."""

    def divide(self, dataset: Dataset, clients: int, key: Key) -> Holdings:
        """Return the first draw that gives every client at least `minimum` examples."""
        examples = _examples_for(dataset, clients)
        if self.minimum * clients > examples:
            raise UserError(
                f"dirichlet: {clients} clients with at least {self.minimum} examples each need "
                f"{self.minimum * clients}, the training set has {examples}; allowed: minimum up to "
                f"{examples // clients}"
            )
        rng = key.fold("dirichlet").numpy()
        labels = dataset.class_labels("partition 'dirichlet'")
        by_class = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        sizes = np.array([len(rows) for rows in by_class])
        for _ in range(REDRAWS):
            shares = rng.dirichlet(np.full(clients, self.alpha), size=len(by_class))
            cuts = (np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
            counts = np.diff(cuts, axis=1, prepend=0, append=sizes[:, None])
            if counts.sum(axis=0).min() >= self.minimum:
                pieces = [np.split(rows, cut) for rows, cut in zip(by_class, cuts, strict=True)]
                return _train_only([np.concatenate(parts) for parts in zip(*pieces, strict=True)])
        raise UserError(
            f"dirichlet: {REDRAWS} draws with alpha = {self.alpha:g} each left one of {clients} clients "
            f"fewer than {self.minimum} examples; use a larger alpha, fewer clients, or a smaller minimum"
        )


@partitions.register("natural")
class Natural(PartitionOptions):
    """The data set comes with its clients (synthetic, your own): each keeps its own examples."""

    def divide(self, dataset: Dataset, clients: int, key: Key) -> Holdings:
        """Return the data set's own holdings; `clients` must be their number."""
        if dataset.natural is None:
            raise UserError(
                f"partition 'natural': {dataset.name} does not come with clients (synthetic and your own "
                f"do); use another partition"
            )
        if clients != dataset.natural.clients:
            raise UserError(
                f"partition 'natural': {dataset.name} was made for {dataset.natural.clients} clients, "
                f"not {clients}; set both numbers alike"
            )
        return dataset.natural


def set_aside(dataset: Dataset, holdings: Holdings, share: Callable[[int], int], key: Key) -> Holdings:
    """Let clients without validation examples set some of their training examples aside: `share` of so many.

    They are those whose content hashes to the least, under the key. So where one example of a client is
    replaced by another, wherever in its list, at most one that is set aside is replaced, and at most one that
    is not: not so if places in the list were drawn, which all move up where a record leaves. Of what
    counts as zero (`Dataset.left_out`) none is set aside where there are others.

    >>> import torch
    >>> x = torch.arange(10.0)[:, None]
    >>> held = Holdings(train=[np.arange(4), np.arange(4, 10)], valid=[], test=[])
    >>> apart = set_aside(Dataset("numbers", x, x, x, x, None), held, lambda count: count // 2, Key(1))
    >>> [len(rows) for rows in apart.train], [len(rows) for rows in apart.valid]
    ([2, 3], [2, 3])
    >>> sorted([*apart.train[0].tolist(), *apart.valid[0].tolist()])
    [0, 1, 2, 3]
    """
    if holdings.valid:
        return holdings
    train, valid = [], []
    for client, rows in enumerate(holdings.train):
        count = share(len(rows))
        if count >= len(rows):
            raise UserError(
                f"client {client} holds {len(rows)} training examples and sets {count} aside: none are left"
            )
        columns = [*columns_of(dataset.x_train).values(), dataset.y_train]
        digests = _digests([column[rows].numpy(force=True) for column in columns], key)
        empty = np.zeros(len(rows)) if dataset.left_out is None else dataset.left_out.numpy()[rows]
        order = np.lexsort((digests, empty))
        valid.append(rows[np.sort(order[:count])])
        train.append(rows[np.sort(order[count:])])
    return replace(holdings, train=train, valid=valid)


def _digests(columns: Sequence[np.ndarray], key: Key) -> np.ndarray:
    """Return a keyed hash of every row of some columns, (rows,)."""
    secret = key.integer().to_bytes(8, "big")
    found = []
    for row in range(len(columns[0])):
        digest = hashlib.blake2b(digest_size=8, key=secret)
        for column in columns:
            digest.update(column[row].tobytes())
        found.append(int.from_bytes(digest.digest(), "big"))
    return np.array(found, dtype=np.uint64)


def mirror(holdings: Holdings, clients: int) -> Holdings:
    """Extend the honest clients' holdings to `clients`: Byzantine client h + j copies honest client j mod h.

    >>> held = Holdings(train=[np.array([0, 1]), np.array([2])], valid=[], test=[])
    >>> [rows.tolist() for rows in mirror(held, 5).train]
    [[0, 1], [2], [0, 1], [2], [0, 1]]
    """
    honest = holdings.clients
    if clients < honest:
        raise UserError(f"cannot mirror {honest} honest clients to {clients}: at least {honest} are needed")

    def extend(held: list[np.ndarray]) -> list[np.ndarray]:
        return [held[client % honest] for client in range(clients)] if held else []

    return Holdings(extend(holdings.train), extend(holdings.valid), extend(holdings.test))


def _by_label(dataset: Dataset, partition: str) -> np.ndarray:
    return np.argsort(dataset.class_labels(f"partition {partition!r}"), kind="stable")


def _even(total: int, parts: int) -> np.ndarray:
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def _examples_for(dataset: Dataset, clients: int) -> int:
    examples = len(dataset.y_train)
    if clients > examples:
        raise UserError(
            f"{clients} clients cannot share the {examples} training examples of {dataset.name}: "
            f"at most {examples} clients"
        )
    return examples


def _train_only(pieces: list[np.ndarray]) -> Holdings:
    return Holdings(train=[np.asarray(rows, dtype=np.int64) for rows in pieces], valid=[], test=[])
