"""Records that are not as declared keep their places and count as zero; nobody is refused for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trilemma import data
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import Declaration, FederatedData, Values

UNIT = Declaration(Values("numbers", (2,), low=0, high=1), Values("whole", low=0, high=1))
TOKENS = Declaration(
    {
        "ids": Values("whole", (4,), low=1, high=9, varies=True),
        "attention_mask": Values("whole", (4,), 0, 1, True, True),
    },
    Values("whole", (4,), low=0, high=2, varies=True),
    ignored=True,
)


def fitted(declaration, load, said=None):
    told = []

    def read(given):
        return data.from_clients([given], classes=declaration.classes, length=declaration.length)

    found = data.fitted(declaration, load, read, told.append)
    assert bool(told) == (said is not None)
    assert said is None or said in told[0]
    return found


def raises():
    raise SystemExit("no table")


ROWS = [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]]


@pytest.mark.parametrize(
    ("bad", "label", "told"),
    [
        ([2.0, 0.0], 0, None),
        ([0.0, 0.0], 7, "label"),
        ([np.nan, 0.0], 0, "finite"),
        ([np.inf, 0.0], 0, "finite"),
        ([0.0, 0.0, 0.0], 0, "shapes"),
        (["many", 0.0], 0, ""),
        ([None, 0.0], 0, ""),
        ([[0.0], 0.0], 0, ""),
        ("patient", 0, ""),
    ],
)
def test_one_record_costs_its_own_place_only(bad, label, told):
    rows, labels = [*ROWS[:2], bad, *ROWS[2:]], [0, 1, label, 1, 0]
    found = fitted(UNIT, lambda: (rows, labels), told)
    assert found.left_out.tolist() == [False, False, True, False, False]
    kept = ~found.left_out
    assert torch.equal(found.x_train[kept], torch.tensor(ROWS))
    assert found.y_train[kept].tolist() == [0, 1, 1, 0]
    assert not found.x_train[2].any()


def test_a_record_that_cannot_be_made_an_example_of_costs_no_other():
    def load(records):
        if any(record is None for record in records):
            raise ValueError
        return [[record, record] for record in records if record > 0.15], [0 for one in records if one > 0.15]

    records, told = [0.1, 0.2, None, 0.3], []

    def read(given):
        return data.from_clients([given], classes=2)

    def alone():
        return [lambda record=record: load([record]) for record in records]

    found = data.fitted(UNIT, lambda: load(records), read, told.append, least=4, one_by_one=alone)
    kept = found.x_train[~found.left_out]
    assert torch.equal(kept, torch.tensor([[0.2, 0.2], [0.3, 0.3]]))
    assert len(found.y_train) == 4
    assert found.natural.train[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("load", [raises, lambda: None, lambda: ([], []), lambda: 1 / 0])
def test_what_cannot_be_loaded_leaves_empty_places(load):
    found = fitted(UNIT, load, "")
    assert found.left_out.all()
    assert len(found.y_train)


def test_items_of_a_data_set_may_raise():
    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, row):
            if row == 2:
                raise KeyError("patient")
            return torch.tensor(ROWS[row]), row % 2

    assert fitted(UNIT, Items, "").left_out.tolist() == [False, False, True, False]


def test_one_record_among_many_is_found_in_few_attempts():
    """One by one a million would take so long that nobody waits for the client."""
    rows, attempts = [[0.5, 0.5]] * 1000, []
    rows[700] = ["many", 0.5]

    def read(given):
        attempts.append(len(given[1]))
        return data.from_clients([given], classes=2)

    found = data.fitted(UNIT, lambda: (rows, [0] * 1000), read, lambda said: None)
    assert found.left_out.nonzero().tolist() == [[700]]
    assert len(attempts) < 30


def test_padding_is_inside():
    given = ({"ids": [[1, 9], [3, 4, 5, 6], [10, 1, 1]]}, [[0, 2], [1, 1, -100, 1], [0, 0, 0]])
    found = fitted(TOKENS, lambda: given)
    assert found.left_out.tolist() == [False, False, True]
    assert found.x_train["ids"].tolist()[0] == [1, 9, 0, 0]


def held(left_out):
    x, y = torch.arange(6.0)[:, None].repeat(1, 2), torch.arange(6) % 2
    natural = data.Holdings([np.arange(6)], [], [])
    out = torch.tensor([row in left_out for row in range(6)])
    return FederatedData(data.Dataset("six", x, y, x[:0], y[:0], 2, natural=natural, left_out=out), natural)


@pytest.mark.parametrize("left_out", [(), (0,), (1, 4), tuple(range(6))])
def test_a_place_that_is_left_out_changes_no_other(left_out):
    """Not which examples are drawn, nor what they weigh."""
    some, all_ = held(left_out), held(())
    for draw in (
        lambda given: given.sample((0,), 4, Key(3)),
        lambda given: given.poisson((0,), 0.9, 4, Key(3)),
        lambda given: given.everything((0,)),
    ):
        found, whole = draw(some), draw(all_)
        assert torch.equal(found.x, whole.x)
        weight = torch.full(whole.y.shape, 1 / whole.y.shape[1]) if whole.weight is None else whole.weight
        out = torch.isin(whole.x[..., 0], torch.tensor(left_out, dtype=torch.float32))
        assert torch.equal(weight * ~out, weight if found.weight is None else found.weight)


@pytest.mark.parametrize("key", range(8))
def test_what_is_set_aside_are_records_where_there_are_some(key):
    """Empty places are all alike: they would all be set aside, or none."""
    found = fitted(UNIT, lambda: (ROWS, [0, 1, 0, 1]))
    padded = data.fitted(UNIT, lambda: (ROWS, [0, 1, 0, 1]), lambda given: found, lambda said: None, least=9)
    apart, alone = (data.set_aside(one, one.natural, lambda count: 3, Key(key)) for one in (padded, found))
    assert [rows.tolist() for rows in apart.valid] == [rows.tolist() for rows in alone.valid]
    assert len(apart.train[0]) == 6


def test_a_client_without_examples_is_still_refused_at_home():
    with pytest.raises(UserError, match="holds no examples"):
        data.from_clients([([], [])])
