"""Stacked batches: one client alone equals its row, draws have the right law, weights add up."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trilemma import data
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import Batch, Dataset, FederatedData, Holdings

SIZES = (7, 12, 5, 9)


def numbered(sizes: tuple[int, ...] = SIZES, own_tests: bool = True) -> FederatedData:
    """Example j has the feature j and the label j mod 10, so a batch tells which examples are in it."""
    total = sum(sizes)
    x = torch.arange(total, dtype=torch.float32)[:, None]
    dataset = Dataset("numbers", x, torch.arange(total) % 10, x, torch.arange(total) % 10, classes=10)
    pieces = np.split(np.random.default_rng(0).permutation(total), np.cumsum(sizes)[:-1])
    own = [*pieces] if own_tests else []
    return FederatedData(dataset, Holdings([*pieces], [piece[:2] for piece in own], own))


def test_an_example_that_is_not_there_leaves_an_empty_place_and_changes_no_other_draw() -> None:
    """So data of another size are neighbours by replacement, and the sampling rate is that of `least`."""
    full = numbered((8, 8), own_tests=False)
    fewer = FederatedData(
        full.dataset, Holdings([full.holdings.train[0][:-1], full.holdings.train[1]], [], []), least=8
    )
    gone = float(full.holdings.train[0][-1])
    assert fewer.poorest((0, 1)) == 8
    found = 0
    for round_ in range(40):
        one, other = (fed.sample((0, 1), 3, Key(2).fold(round_)) for fed in (full, fewer))
        away = one.x[0, :, 0] == gone
        found += int(away.sum())
        assert torch.equal(one.x[1], other.x[1])
        assert torch.equal(one.x[0, ~away], other.x[0, ~away])
        expected = torch.full((2, 3), 1 / 3)
        expected[0, away] = 0.0
        assert torch.equal(expected, torch.full((2, 3), 1 / 3) if other.weight is None else other.weight)
    assert 5 < found < 30  # 3 of 8 places in each of 40 rounds
    with pytest.raises(UserError, match="exceeds the 8 training examples"):
        fewer.sample((0,), 9, Key(1))


def pictures(flip: bool) -> FederatedData:
    x = torch.rand(40, 1, 3, 4, generator=Key(9).torch())
    y = torch.arange(40) % 2
    dataset = Dataset("pictures", x, y, x, y, 2, augment=data.horizontal_flip if flip else None)
    return FederatedData(dataset, data.divide("homogeneous", dataset, 4, key=Key(1)))


def held(fed: FederatedData, client: int) -> set[float]:
    return {float(row) for row in fed.holdings.train[client]}


DRAWS: dict[str, Callable[[FederatedData, tuple[int, ...], Key], Batch]] = {
    "sample": lambda fed, ids, key: fed.sample(ids, 4, key),
    "poisson": lambda fed, ids, key: fed.poisson(ids, 0.4, 3, key),
    "epoch": lambda fed, ids, key: fed.epoch_batches(ids, 4, 6, key)[5],
    "everything": lambda fed, ids, key: fed.everything(ids),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("make", [numbered, lambda: pictures(flip=True)], ids=["numbers", "flipped"])
@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (3, 1), (2, 2)])
def test_alone_equals_stacked(
    draw: Callable[[FederatedData, tuple[int, ...], Key], Batch], make: Callable[[], FederatedData], ids
) -> None:  # type: ignore[no-untyped-def]
    fed = make()
    key = Key(1).fold("round", 3)
    together = draw(fed, ids, key)
    for row, i in enumerate(ids):
        alone = draw(fed, (i,), key)
        width = alone.x.shape[1]
        assert torch.equal(alone.x[0], together.x[row, :width])
        assert torch.equal(alone.y[0], together.y[row, :width])
        if alone.weight is not None and together.weight is not None:
            assert torch.equal(alone.weight[0], together.weight[row, :width])
            assert not together.weight[row, width:].any()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 2**32))
def test_samples_are_own_and_distinct(sizes: list[int], seed: int) -> None:
    fed = numbered(tuple(sizes))
    ids = range(len(sizes))
    batch = fed.sample(ids, min(sizes), Key(seed))
    assert batch.weight is None
    for i in ids:
        drawn = batch.x[i].flatten().tolist()
        assert len(set(drawn)) == min(sizes)
        assert set(drawn) <= held(fed, i)
    assert torch.equal(batch.y, batch.x[..., 0].long() % 10)


def test_samples_are_uniform_and_rounds_differ() -> None:
    fed = numbered((10, 10))
    counts = torch.zeros(20)
    rounds = 2000
    for number in range(rounds):
        counts += torch.bincount(fed.sample((0, 1), 3, Key(number)).x.flatten().long(), minlength=20)
    deviation = (rounds * 0.3 * 0.7) ** 0.5
    assert float((counts - rounds * 0.3).abs().max()) < 4.5 * deviation


def test_a_batch_larger_than_a_client_says_what_is_allowed() -> None:
    with pytest.raises(
        UserError, match="batch size 6 exceeds the 5 training examples of client 2; allowed: 1 to 5"
    ):
        numbered().sample((0, 2), 6, Key(1))
    numbered().sample((0, 1), 6, Key(1))


def test_bad_requests_are_refused() -> None:
    fed = numbered()
    with pytest.raises(UserError, match="client 4 does not exist; allowed: 0 to 3"):
        fed.sample((0, 4), 2, Key(1))
    with pytest.raises(UserError, match="at least one"):
        fed.everything(())
    with pytest.raises(UserError, match="at least 1"):
        fed.sample((0,), 0, Key(1))
    with pytest.raises(UserError, match="0 < rate"):
        fed.poisson((0,), 1.5, 3, Key(1))
    with pytest.raises(UserError, match="at least 0"):
        fed.epoch_batches((0,), 4, -1, Key(1))


def test_bad_holdings_are_refused() -> None:
    fed = numbered()
    some, none = np.array([0, 1]), np.empty(0, dtype=np.int64)
    for holdings, complaint in (
        (Holdings([some, none], [], []), "client 1 holds no training examples"),
        (Holdings([some, np.array([99])], [], []), "outside 0 … 32"),
        (Holdings([some, some], [some], []), "for every client or for none"),
    ):
        with pytest.raises(UserError, match=complaint):
            FederatedData(fed.dataset, holdings)


def test_poisson_has_the_law_of_independent_coins() -> None:
    fed = numbered((6, 30))
    rate, rounds = 0.3, 3000
    inclusion, pairs, sizes = torch.zeros(36), 0, []
    own = fed.holdings.train[0]
    for number in range(rounds):
        batch = fed.poisson((0, 1), rate, 9, Key(number))
        assert batch.weight is not None
        present = batch.weight > 0
        drawn = batch.x[..., 0].long()[present]
        assert len(drawn.unique()) == len(drawn)
        inclusion[drawn] += 1
        mine = set(drawn.tolist())
        pairs += own[0] in mine and own[1] in mine
        sizes.append(int(present[1].sum()))
        assert torch.allclose(batch.weight[1][present[1]], torch.tensor(1 / 9))
    assert float((inclusion - rounds * rate).abs().max()) < 4.5 * (rounds * rate * (1 - rate)) ** 0.5
    assert pairs == pytest.approx(rounds * rate**2, abs=4.5 * (rounds * rate**2) ** 0.5)
    assert np.mean(sizes) == pytest.approx(30 * rate, rel=0.05)
    assert np.var(sizes) == pytest.approx(30 * rate * (1 - rate), rel=0.15)


def test_an_example_that_comes_or_goes_moves_a_poisson_sum_by_its_own_share() -> None:
    """The weights of the others are the same whoever is there: they are public constants."""
    for rate in (1.0, 0.5):
        few, many = (numbered((held, 4)).poisson((0,), rate, 2, Key(3)).weight for held in (5, 6))
        assert few is not None
        assert many is not None
        assert set(few.unique().tolist()) | set(many.unique().tolist()) <= {0.0, 0.5}


def test_an_empty_poisson_draw_is_padding_only() -> None:
    fed = numbered((2, 2))
    empty = next(
        key for key in map(Key, range(200)) if float(fed.poisson((0,), 0.1, 1, key).weight.sum()) == 0
    )  # type: ignore[union-attr]
    batch = fed.poisson((0,), 0.1, 1, empty)
    assert batch.x.shape == (1, 25, 1)
    assert set(batch.x.flatten().tolist()) <= set(held(fed, 0))


def test_everything_of_every_split() -> None:
    fed = numbered()
    for split, sizes in (("train", SIZES), ("valid", (2, 2, 2, 2)), ("test", SIZES)):
        batch = fed.everything(range(4), split)  # type: ignore[arg-type]
        assert batch.weight is not None
        assert batch.x.shape[1] == max(sizes)
        for i, size in enumerate(sizes):
            assert int((batch.weight[i] > 0).sum()) == size
            real = batch.x[i, batch.weight[i] > 0, 0]
            assert set(real.tolist()) == {float(row) for row in getattr(fed.holdings, split)[i]}
            assert float(batch.weight[i].sum()) == pytest.approx(1)


def test_a_client_without_validation_examples_has_no_weight() -> None:
    fed = numbered((3, 2))
    none = np.empty(0, dtype=np.int64)
    fed = FederatedData(fed.dataset, Holdings(fed.holdings.train, [fed.holdings.train[0], none], []))
    batch = fed.everything((0, 1), "valid")
    assert batch.weight is not None
    assert batch.weight.sum(dim=1).tolist() == pytest.approx([1.0, 0.0])


def test_without_own_test_examples_everyone_gets_the_test_set_in_shared_memory() -> None:
    fed = numbered(own_tests=False)
    batch = fed.everything((0, 3), "test")
    assert batch.x.shape == (2, 33, 1)
    assert batch.x.untyped_storage().data_ptr() == fed.dataset.x_test.untyped_storage().data_ptr()
    assert batch.weight is not None
    assert float(batch.weight.sum()) == pytest.approx(2)
    with pytest.raises(UserError, match="no validation examples"):
        fed.everything((0,), "valid")


@given(
    st.lists(st.integers(1, 15), min_size=1, max_size=4),
    st.integers(1, 18),
    st.integers(0, 2**32),
)
def test_epochs_use_every_example_once_and_keep_the_last_partial_batch(
    sizes: list[int], size: int, seed: int
) -> None:
    fed = numbered(tuple(sizes))
    ids = range(len(sizes))
    per_epoch = [-(-m // size) for m in sizes]
    steps = 3 * max(per_epoch)
    batches = fed.epoch_batches(ids, size, steps, Key(seed))
    assert len(batches) == steps
    for i in ids:
        orders = []
        for epoch in range(steps // per_epoch[i]):
            seen: list[float] = []
            for batch in batches[epoch * per_epoch[i] : (epoch + 1) * per_epoch[i]]:
                weight = (
                    torch.full(batch.y.shape, 1 / batch.y.shape[1]) if batch.weight is None else batch.weight
                )
                assert batch.weight is None or bool((batch.weight == 0).any()), "weights without padding"
                real = weight[i] > 0
                assert float(weight[i].sum()) == pytest.approx(1)
                assert len(weight[i][real].unique()) == 1
                seen += batch.x[i, real, 0].tolist()
            assert sorted(seen) == sorted(held(fed, i))
            orders.append(seen)
        if sizes[i] >= 10:
            assert orders[0] != orders[1]


def test_epoch_batches_continue_without_state() -> None:
    fed = numbered()
    key = Key(3)
    whole = fed.epoch_batches(range(4), 4, 11, key)
    for start in (0, 2, 7):
        for late, early in zip(fed.epoch_batches(range(4), 4, 4, key, start), whole[start:], strict=False):
            assert torch.equal(late.x, early.x)
            assert torch.equal(late.y, early.y)
    with pytest.raises(IndexError):
        whole[11]


def test_flips_are_per_example_from_the_key_and_only_for_training() -> None:
    plain, flipped = pictures(flip=False), pictures(flip=True)
    key = Key(4)
    x, z = plain.sample(range(4), 10, key).x, flipped.sample(range(4), 10, key).x
    same = (x == z).flatten(2).all(dim=2)
    mirrored = (x.flip(-1) == z).flatten(2).all(dim=2)
    assert bool((same ^ mirrored).all())
    assert 8 < int(mirrored.sum()) < 32
    assert torch.equal(z, flipped.sample(range(4), 10, key).x)
    assert torch.equal(plain.everything(range(4)).x, flipped.everything(range(4)).x)
    first, second = flipped.epoch_batches((0,), 10, 2, key)
    assert sorted(first.x.abs().sum(dim=(2, 3, 4))[0].tolist()) == pytest.approx(
        sorted(second.x.abs().sum(dim=(2, 3, 4))[0].tolist())
    )


def test_labels_belong_to_the_holder() -> None:
    fed = numbered()
    shared = FederatedData(fed.dataset, data.mirror(fed.holdings, 6))
    liars = shared.with_labels((4, 5), lambda labels, client: (labels + client) % 10)
    for draw in DRAWS.values():
        before, after = (draw(f, (0, 1, 4, 5), Key(1)) for f in (shared, liars))
        assert torch.equal(before.x, after.x)
        assert torch.equal(before.y[:2], after.y[:2])
        assert torch.equal((before.y[2] + 4) % 10, after.y[2])
        assert torch.equal((before.y[3] + 5) % 10, after.y[3])
    assert torch.equal(liars.everything((4,), "test").y, shared.everything((4,), "test").y)
    with pytest.raises(UserError, match="must lie in 0 … 9"):
        fed.with_labels((0,), lambda labels, client: labels + 100)
    with pytest.raises(UserError, match="new labels for 7 examples"):
        fed.with_labels((0,), lambda labels, client: labels[:3])


def test_nothing_touches_the_global_generators() -> None:
    fed = pictures(flip=True)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]  # noqa: NPY002
    for draw in DRAWS.values():
        draw(fed, (0, 1, 2, 3), Key(1))
    assert torch.equal(torch_before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


def test_drawing_for_100_clients_costs_little() -> None:
    """A bound far above the measured 1.5 ms of processor time, so that only a change of method breaks it."""
    dataset = Dataset(
        "long", torch.zeros(60_000, 1), torch.zeros(60_000, dtype=torch.int64), *[torch.zeros(0)] * 2, 2
    )
    fed = FederatedData(dataset, data.divide("homogeneous", dataset, 10, key=Key(1)))
    best = float("inf")
    for number in range(10):
        start = time.process_time()
        fed.sample(tuple(range(10)) * 10, 50, Key(number))
        best = min(best, time.process_time() - start)
    assert best < 0.015


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_on_cuda_equal_those_on_the_cpu() -> None:
    cpu = pictures(flip=True)
    cuda = FederatedData(cpu.dataset, cpu.holdings, "cuda")
    for draw in DRAWS.values():
        here, there = (draw(fed, (0, 3), Key(1)) for fed in (cpu, cuda))
        assert there.x.is_cuda
        assert torch.equal(here.x, there.x.cpu())
        assert torch.equal(here.y, there.y.cpu())
