"""Partitions: what every registered one promises, and what each defines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trilemma import data
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key
from trilemma.data.sets.synthetic import Synthetic

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST_COUNTS = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("homogeneous", {}),
    ("extreme", {}),
    ("gamma-similarity", {"gamma": 0.0}),
    ("gamma-similarity", {"gamma": 0.37}),
    ("gamma-similarity", {"gamma": 1.0}),
    ("dirichlet", {"alpha": 0.1}),
    ("dirichlet", {"alpha": 1.0, "minimum": 2}),
    ("shards", {"classes_per_client": 1}),
    ("shards", {"classes_per_client": 2, "variant": "equal"}),
    ("natural", {}),
]


def labelled(train: np.ndarray, test: np.ndarray, classes: int) -> data.Dataset:
    y_train, y_test = (torch.from_numpy(np.asarray(y, dtype=np.int64)) for y in (train, test))
    return data.Dataset(
        "labels", torch.zeros(len(y_train), 1), y_train, torch.zeros(len(y_test), 1), y_test, classes
    )


def with_counts(train: list[int], test: list[int], seed: int = 0) -> data.Dataset:
    rng = np.random.default_rng(seed)
    shuffled = [rng.permutation(np.repeat(np.arange(len(counts)), counts)) for counts in (train, test)]
    return labelled(shuffled[0], shuffled[1], len(train))


def lists(holdings: data.Holdings) -> list[list[list[int]]]:
    return [[rows.tolist() for rows in part] for part in (holdings.train, holdings.valid, holdings.test)]


def test_every_partition_is_under_test() -> None:
    assert {name for name, _ in VARIANTS} == set(data.partitions)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@given(st.data())
def test_every_partition_divides(name: str, options: dict[str, Any], given_data: st.DataObject) -> None:
    draw = given_data.draw
    seed = draw(st.integers(0, 2**32))
    if name == "natural":
        clients = draw(st.integers(1, 6))
        dataset = Synthetic(clients=clients, size=draw(st.integers(5, 40))).load(
            Key(seed), data.Storage.from_environment()
        )
    else:
        classes = draw(st.integers(2, 6))
        unit = classes // np.gcd(classes, options.get("classes_per_client", 1)) if name == "shards" else 1
        clients = unit * draw(st.integers(1, 3))
        counts = draw(st.lists(st.integers(3 * clients + 1, 60), min_size=classes, max_size=classes))
        dataset = with_counts(counts, [clients] * classes, seed)
    holdings = data.divide(name, dataset, clients, key=Key(seed), **options)

    assert holdings.clients == clients
    assert all(len(rows) for rows in holdings.train), "a client without training examples"
    assert len(holdings.valid) in (0, clients)
    assert len(holdings.test) in (0, clients)
    learned = np.concatenate([*holdings.train, *holdings.valid])
    assert learned.dtype == np.int64
    assert len(np.unique(learned)) == len(learned), "an example used twice"
    if options.get("variant") == "equal":
        kept = int(torch.bincount(dataset.y_train, minlength=dataset.classes).min()) - 1
        assert torch.bincount(dataset.y_train[torch.from_numpy(learned)]).tolist() == [kept] * dataset.classes
    else:
        assert np.array_equal(np.sort(learned), np.arange(len(dataset.y_train))), "an example left out"
    if holdings.test:
        assert np.array_equal(np.sort(np.concatenate(holdings.test)), np.arange(len(dataset.y_test)))
    again = data.divide(name, dataset, clients, key=Key(seed), **options)
    assert lists(again) == lists(holdings), "not a function of the key"


@pytest.mark.parametrize(
    ("name", "options"), [v for v in VARIANTS if v[0] in ("homogeneous", "dirichlet", "shards")]
)
def test_another_key_divides_otherwise(name: str, options: dict[str, Any]) -> None:
    dataset = with_counts([50] * 4, [20] * 4)
    one, other = (data.divide(name, dataset, 8, key=Key(seed), **options) for seed in (1, 2))
    assert lists(one) != lists(other)


@pytest.mark.parametrize("name", ["homogeneous", "extreme", "gamma-similarity", "dirichlet"])
def test_more_clients_than_examples_is_an_error(name: str) -> None:
    needed = {"gamma-similarity": {"gamma": 0.5}, "dirichlet": {"alpha": 1.0}}.get(name, {})
    dataset = with_counts([2, 2], [1, 1])
    with pytest.raises(UserError, match="at most 4 clients"):
        data.divide(name, dataset, 5, key=Key(1), **needed)
    with pytest.raises(UserError, match="at least 1"):
        data.divide(name, dataset, 0, key=Key(1), **needed)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("clients", [1, 3, 5, 7])
def test_gamma_similarity_mixes(gamma: float, clients: int) -> None:
    dataset = with_counts([13, 9, 11], [1, 1, 1])
    held = data.divide("gamma-similarity", dataset, clients, key=Key(3), gamma=gamma)
    sizes = [len(rows) for rows in held.train]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    if gamma == 0.0:
        assert lists(held) == lists(data.divide("extreme", dataset, clients, key=Key(3)))
    sorted_parts = np.concatenate(
        [
            rows[int(gamma * 33) // clients + (i < int(gamma * 33) % clients) :]
            for i, rows in enumerate(held.train)
        ]
    )
    labels = dataset.y_train.numpy()[sorted_parts]
    assert np.array_equal(labels, np.sort(labels))
    assert len(labels) == 33 - int(gamma * 33)


def test_extreme_is_sorted_by_label() -> None:
    dataset = with_counts([10, 10, 10, 10], [1] * 4)
    held = data.divide("extreme", dataset, 4, key=Key(1))
    assert [dataset.y_train[torch.from_numpy(rows)].unique().tolist() for rows in held.train] == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_homogeneous_follows_the_label_shares() -> None:
    dataset = with_counts([6000, 2000], [1, 1])
    for rows in data.divide("homogeneous", dataset, 4, key=Key(5)).train:
        share = float((dataset.y_train[torch.from_numpy(rows)] == 0).float().mean())
        assert share == pytest.approx(0.75, abs=5 * (0.75 * 0.25 / 2000) ** 0.5)


def test_dirichlet_shares_have_the_right_moments() -> None:
    # A class's shares are Dirichlet(α, …, α) over n clients: mean 1/n, variance (n−1)/(n²(nα+1)).
    clients, alpha, classes = 4, 0.5, 400
    dataset = with_counts([200] * classes, [1] * classes)
    held = data.divide("dirichlet", dataset, clients, key=Key(1), alpha=alpha)
    shares = (
        np.stack([np.bincount(dataset.y_train.numpy()[rows], minlength=classes) for rows in held.train]) / 200
    )
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert shares.mean(axis=1) == pytest.approx(1 / clients, abs=5 * (variance / classes) ** 0.5)
    assert shares.var(axis=1) == pytest.approx(variance, rel=0.25)


def test_dirichlet_redraws_until_the_minimum_or_says_so() -> None:
    dataset = with_counts([40, 40], [1, 1])
    held = data.divide("dirichlet", dataset, 4, key=Key(1), alpha=0.3, minimum=10)
    assert min(len(rows) for rows in held.train) >= 10
    with pytest.raises(UserError, match=r"1000 draws with alpha = 0\.001"):
        data.divide("dirichlet", dataset, 8, key=Key(1), alpha=0.001, minimum=10)
    with pytest.raises(UserError, match="minimum up to 20"):
        data.divide("dirichlet", dataset, 4, key=Key(1), alpha=1.0, minimum=21)


def test_options_are_validated() -> None:
    dataset = with_counts([40, 40], [1, 1])
    with pytest.raises(ConfigError, match="alpha = 0"):
        data.divide("dirichlet", dataset, 4, key=Key(1), alpha=0)
    with pytest.raises(ConfigError, match=r"gamma = 1\.5"):
        data.divide("gamma-similarity", dataset, 4, key=Key(1), gamma=1.5)
    with pytest.raises(ConfigError, match="did you mean 'dirichlet'"):
        data.divide("dirichelt", dataset, 4, key=Key(1))
    with pytest.raises(ConfigError, match="needs alpha"):
        data.divide("dirichlet", dataset, 4, key=Key(1))


# ------------------------------------------------------------------------------------------------ shards


@pytest.mark.parametrize(
    ("train", "test", "clients", "examples", "valid"),
    [
        (MNIST_COUNTS, MNIST_TEST_COUNTS, 100, 434, {108}),
        ([6000] * 10, [1000] * 10, 100, 480, {118, 119, 120}),
        ([5000] * 10, [1000] * 10, 200, 200, {48, 49, 50}),
    ],
    ids=["mnist", "fashion-mnist", "cifar10"],
)
def test_shards_have_the_published_sizes(
    train: list[int], test: list[int], clients: int, examples: int, valid: set[int]
) -> None:
    dataset = with_counts(train, test)
    held = data.divide("shards", dataset, clients, key=Key(2021), classes_per_client=2, variant="equal")
    assert {len(rows) for rows in held.train} == {examples}
    assert {len(rows) for rows in held.valid} <= valid
    assert sum(len(rows) for rows in held.test) == sum(test)


def test_shards_give_each_client_one_mix_of_classes() -> None:
    dataset = with_counts(MNIST_COUNTS, MNIST_TEST_COUNTS)
    held = data.divide("shards", dataset, 100, key=Key(1), classes_per_client=2)
    for parts in zip(held.train, held.valid, held.test, strict=True):
        labels = [dataset.y_train, dataset.y_train, dataset.y_test]
        mixes = [y[torch.from_numpy(rows)].unique().tolist() for y, rows in zip(labels, parts, strict=True)]
        assert mixes[0] == mixes[1] == mixes[2]
        assert len(mixes[0]) == 2


def test_shards_are_contiguous_and_popped_from_the_end() -> None:
    dataset = labelled(np.zeros(11), np.zeros(5), classes=1)
    held = data.divide("shards", dataset, 2, key=Key(1), classes_per_client=1)
    # 11 = 6 + 5: the last shard, of 5, goes first; its last ⌊5 · .2⌋ = 1 example is for validation.
    assert lists(held) == [
        [[6, 7, 8, 9], [0, 1, 2, 3, 4]],
        [[10], [5]],
        [[3, 4], [0, 1, 2]],
    ]


def test_shards_take_from_the_fullest_classes() -> None:
    # 3 classes, 2 per client: after the first client one class is fuller, so the second must take it.
    dataset = with_counts([8, 8, 8], [4, 4, 4])
    for seed in range(20):
        held = data.divide("shards", dataset, 3, key=Key(seed), classes_per_client=2)
        first, second = (set(dataset.y_train[torch.from_numpy(rows)].tolist()) for rows in held.train[:2])
        assert ({0, 1, 2} - first) <= second


def test_shards_say_what_is_possible() -> None:
    dataset = with_counts([30] * 10, [10] * 10)
    with pytest.raises(UserError, match="multiples of 5 clients"):
        data.divide("shards", dataset, 7, key=Key(1), classes_per_client=2)
    with pytest.raises(UserError, match="allowed: 1 to 10"):
        data.divide("shards", dataset, 10, key=Key(1), classes_per_client=11)
    with pytest.raises(UserError, match="cannot be cut into 40 shards"):
        data.divide("shards", dataset, 200, key=Key(1), classes_per_client=2)


# ----------------------------------------------------------------------------------- natural and mirrored


def test_natural_needs_a_data_set_with_its_number_of_clients() -> None:
    made = data.load("synthetic", key=Key(1), clients=4, size=20)
    with pytest.raises(UserError, match="made for 4 clients, not 5"):
        data.divide("natural", made, 5, key=Key(1))
    with pytest.raises(UserError, match="does not come with clients"):
        data.divide("natural", with_counts([5, 5], [1, 1]), 2, key=Key(1))


def test_mirror_copies_the_honest_clients_in_turn() -> None:
    dataset = with_counts([20, 20], [8, 8])
    held = data.divide("shards", dataset, 4, key=Key(1), classes_per_client=1)
    extended = data.mirror(held, 7)
    for part, own in zip(lists(extended), lists(held), strict=True):
        assert part == own + own[:3]
    assert data.mirror(data.divide("homogeneous", dataset, 4, key=Key(1)), 6).test == []
    with pytest.raises(UserError, match="at least 4"):
        data.mirror(held, 3)
