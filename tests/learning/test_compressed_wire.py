"""Encodings: what is decoded is what was sent, and the sizes on record are those of real bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trilemma.errors import UserError
from trilemma.keys import Key
from trilemma.learning.compressed.qsgd import dequantise, quantise
from trilemma.learning.compressed.wire import (
    Quantised,
    QuantisedFormat,
    decode_dense,
    decode_sparse,
    encode_dense,
    encode_sparse,
    sparse_bytes,
)


def test_dense_round_trip() -> None:
    vector = torch.randn(33, generator=Key(1).torch())
    assert torch.equal(decode_dense(encode_dense(vector)), vector)
    assert len(encode_dense(vector)) == 4 * 33


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 700), bucket=st.integers(1, 300), levels=st.integers(2, 40), seed=st.integers(0, 99)
)
def test_quantised_round_trip(dim: int, bucket: int, levels: int, seed: int) -> None:
    layout = QuantisedFormat(dim, bucket, levels)
    generator = Key(seed).torch()
    vectors = torch.randn(1, dim, generator=generator)
    vectors[:, : dim // 3] = 0.0
    scales, codes = quantise(vectors, torch.rand(1, dim, generator=generator), layout)
    message = layout.encode(Quantised(scales[0], codes[0]))
    back = layout.decode(message)
    assert len(message) == layout.size
    assert torch.equal(back.scales, scales[0])
    assert torch.equal(back.codes, codes[0])


def test_quantised_size_is_that_of_the_reference_count() -> None:
    """(D + 32⌈D/bucket⌉ + D⌈log2 levels⌉)/32 scalars, the last byte rounded up."""
    for dim, bucket, levels in [(610, 500, 5), (79510, 1000, 10), (678794, 2000, 15)]:
        layout = QuantisedFormat(dim, bucket, levels)
        log = {5: 3, 10: 4, 15: 4}[levels]
        assert layout.scalars == (dim + 32 * -(-dim // bucket) + dim * log) / 32
        assert 0 <= layout.size - 4 * layout.scalars < 1


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(UserError, match="313 bytes"):
        QuantisedFormat(610, 500, 5).decode(b"short")
    with pytest.raises(UserError, match="at least 2 levels"):
        QuantisedFormat(610, 500, 1)


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 40_000),
    density=st.sampled_from([0.0, 0.0001, 0.001, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_sparse_round_trip(dim: int, density: float, seed: int) -> None:
    generator = Key(seed).torch()
    vector = torch.randn(dim, generator=generator)
    mask = torch.rand(dim, generator=generator) < density
    message = encode_sparse(vector, mask)
    assert torch.equal(decode_sparse(message, dim), torch.where(mask, vector, 0.0))
    assert len(message) == int(sparse_bytes(mask[None])[0])


def test_sparse_sizes_of_many_messages() -> None:
    mask = torch.rand(7, 5000, generator=Key(1).torch()) < 0.01
    mask[3] = False
    mask[4] = True
    lengths = [len(encode_sparse(torch.ones(5000), row)) for row in mask]
    assert sparse_bytes(mask).tolist() == lengths


def test_sparse_messages_that_do_not_fit_are_refused() -> None:
    message = encode_sparse(torch.ones(300), torch.arange(300) > 290)
    with pytest.raises(UserError, match="does not fit"):
        decode_sparse(message, 200)


@pytest.mark.parametrize("scale", ["max", "l2"])
def test_quantisation_is_unbiased(scale: str) -> None:
    """40,000 roundings; every coordinate's mean within five standard errors of the value it stands for."""
    layout = QuantisedFormat(dim=8, bucket=4, levels=5)
    vector = torch.tensor([[0.9, -0.33, 0.0, 0.05, -2.0, 1.1, 0.77, -0.01]])
    count = 40_000
    coins = torch.rand(count, 8, generator=Key(2).torch())
    scales, codes = quantise(vector.expand(count, -1), coins, layout, scale)
    values = dequantise(scales, codes, layout).double()
    error = values.std(0) / count**0.5
    assert bool(((values.mean(0) - vector[0].double()).abs() <= 5 * error + 1e-6).all())
    assert codes.abs().max() <= 4


def test_a_bucket_of_zeros_is_sent_as_zeros() -> None:
    layout = QuantisedFormat(dim=6, bucket=3, levels=5)
    vectors = torch.tensor([[0.0, 0, 0, 1.0, 2.0, -3.0]])
    scales, codes = quantise(vectors, torch.full((1, 6), 0.999), layout)
    assert codes[0, :3].tolist() == [0, 0, 0]
    assert torch.isfinite(dequantise(scales, codes, layout)).all()
