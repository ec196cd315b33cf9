"""What a record may be: said in words, written and read, and made up records that keep to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trilemma
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.data import (
    IGNORED,
    Declaration,
    Values,
    columns_of,
    declaration_of,
    from_clients,
    made_up,
)

SENTENCES = Declaration(
    {
        "ids": Values("whole", (7,), 0, 99, varies=True),
        "attention_mask": Values("whole", (7,), 0, 1, True, True),
    },
    Values("whole", (7,), 0, 4, varies=True),
    ignored=True,
)
TABLE = Declaration(Values("numbers", (3,), low=-1.0, high=4.0), Values("whole", high=2))


@pytest.mark.parametrize("declaration", [SENTENCES, TABLE, Declaration(Values(), Values("yes-no", (3,)))])
def test_made_up_records_are_allowed_and_of_all_kinds(declaration):
    x, y = made_up(declaration, 12, Key(3))
    for name, column in columns_of(x).items():
        values = declaration.columns[name]
        assert (column.dtype, column.shape[1:]) == (values.dtype, values.shape)
        assert not values.outside(column).any()
        assert len({row.numpy().tobytes() for row in column}) > 1
    labels = y[y != IGNORED] if declaration.ignored else y
    assert not declaration.y.outside(labels.flatten()).any()
    assert torch.equal(y, made_up(declaration, 12, Key(3))[1])


def test_made_up_sentences_are_of_different_lengths_and_their_masks_say_so():
    x, y = made_up(SENTENCES, 12, Key(3))
    lengths = x["attention_mask"].sum(1)
    assert {1, 7} < set(lengths.tolist())
    for ids, labels, length in zip(x["ids"], y, lengths.tolist(), strict=True):
        assert not ids[length:].any()
        assert (labels[length:] == IGNORED).all()
        assert (labels[:length] != IGNORED).all()


def test_a_declaration_of_data_is_what_they_fit():
    ragged = [([[1, 2, 3], [4], [5, 6]], [0, 1, 1]), ([[7], [8, 9], [1]], [1, 0, 1])]
    found = declaration_of(from_clients(ragged), seen=True)
    assert found.columns["x"] == Values("whole", (3,), 0, 9, varies=True)
    assert found.columns["attention_mask"].mask
    assert (found.length, found.classes) == (3, 2)
    assert Declaration.read(found.plain()) == found
    numbers = declaration_of(from_clients([(np.zeros((4, 2)), np.array([0.5, 1, 2, 3]))]))
    assert (numbers.classes, numbers.x, numbers.y) == (None, Values("numbers", (2,)), Values())


def test_what_a_record_may_be_is_said_where_it_is_wrong():
    assert trilemma.Values is Values
    for wrong, said in (
        (lambda: Values("text"), "allowed: numbers, whole, yes-no"),
        (lambda: Values(shape=(0,)), "1 or more"),
        (lambda: Values(low=2, high=1), "above"),
        (lambda: Values(low=float("nan")), "finite"),
        (lambda: Values(varies=True), "longest"),
        (lambda: Declaration.read({"x": {"": {"kind": "numbers"}}}), "y"),
        (lambda: Declaration.read({"x": {}, "y": {}}), "a mapping of names"),
    ):
        with pytest.raises(UserError, match=said):
            wrong()


@given(st.sampled_from(["numbers", "whole"]), st.integers(-5, 5), st.integers(0, 5), st.integers(0, 20))
def test_no_made_up_number_is_outside(kind, low, wide, seed):
    values = Values(kind, (2,), low, low + wide)
    x, _ = made_up(Declaration(values, Values()), 7, Key(seed))
    assert not values.outside(x).any()
