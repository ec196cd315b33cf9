"""Draws of many clients at once are numpy's, client by client."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilemma.base.keys import Key
from trilemma.data.batches.streams import drawn_each, each_stream


@given(st.integers(1, 80), st.lists(st.integers(0, 3000), min_size=8, max_size=12), st.integers(0, 2**31))
def test_compiled_draws_are_numpys(size: int, more: list[int], seed: int) -> None:
    keys = [Key(seed).fold("client", i) for i in range(len(more))]
    sizes = [size + extra for extra in more]
    expected = [s.choice(m, size, replace=False) for m, s in zip(sizes, each_stream(keys), strict=True)]
    assert np.array_equal(drawn_each([key.integer() for key in keys], sizes, size), np.stack(expected))


@pytest.mark.parametrize("many", [10_000, 10_001, 30_000])
def test_a_large_part_of_many_is_drawn_as_numpy_does(many: int) -> None:
    keys = [Key(1).fold("client", i) for i in range(8)]
    expected = [stream.choice(many, 500, replace=False) for stream in each_stream(keys)]
    assert np.array_equal(drawn_each([key.integer() for key in keys], [many] * 8, 500), np.stack(expected))
