"""Encodings: what is decoded is what was sent, and the sizes on record are those of real bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from personal_clients import setup

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.learning import MessageLayout
from trilemma.learning.messages import ENCODED
from trilemma_lab.compressed.count_sketch import Sketch
from trilemma_lab.compressed.dgc import DGC, SparseCodec
from trilemma_lab.compressed.lbgm import LBGM
from trilemma_lab.compressed.qsgd import QSGD, dequantise, quantise
from trilemma_lab.compressed.wire import (
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
    back, sent = decode_sparse(message, dim)
    assert torch.equal(back, torch.where(mask, vector, 0.0))
    assert torch.equal(sent, mask)
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


def test_a_sparse_message_with_a_broken_header_is_refused() -> None:
    for message in (b"", b"\0\0\0", b"\7" + bytes(4), b"\0" + b"\xff" * 4, b"\1\1\0\0\0\x80" + bytes(4)):
        with pytest.raises(UserError):
            decode_sparse(message, 20)


def test_a_gap_longer_than_any_vector_is_refused() -> None:
    """Six groups of seven bits: a position that would overflow, were it summed."""
    with pytest.raises(UserError, match="five bytes"):
        decode_sparse(b"\1" + (1).to_bytes(4, "little") + b"\xff" * 9 + b"\x7f" + bytes(4), 100)


def test_codes_and_scales_outside_their_range_are_refused() -> None:
    layout = QuantisedFormat(dim=2, bucket=2, levels=5)
    fine = layout.encode(Quantised(torch.ones(1), torch.tensor([4, -4])))
    assert layout.decode(fine).codes.tolist() == [4, -4]
    with pytest.raises(UserError, match="±4"):
        layout.decode(fine[:4] + b"\xff")
    for scale in (-1.0, torch.inf, torch.nan):
        with pytest.raises(UserError, match="finite"):
            layout.decode(encode_dense(torch.tensor([scale])) + fine[4:])


LAYOUTS = [
    method.build(setup(3)).message(models.build("logistic", (12,), 2))
    for method in (QSGD(bucket=5), DGC(), LBGM(), Sketch(columns=3, rows=2, kept=2))
]


@given(data=st.binary(max_size=90), layout=st.sampled_from(LAYOUTS), form=st.integers(0, 2))
def test_hostile_bytes_are_read_or_refused(data: bytes, layout: MessageLayout, form: int) -> None:
    """Whatever comes, the outcome is a message of the declared shape or a `UserError`."""
    if form and isinstance(layout.codec, SparseCodec):  # past the header, into the positions
        data = bytes([form - 1]) + min(len(data) // 4, 13).to_bytes(4, "little") + data
    try:
        read = layout.decode({ENCODED: torch.tensor(list(data), dtype=torch.uint8)})
    except UserError:
        return
    assert read.vectors.shape == (1, layout.dim)
    again = layout.encode(read)
    assert len(again[ENCODED]) <= layout.longest.bytes


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), layout=st.sampled_from(LAYOUTS[:3]))
def test_one_flipped_bit_is_read_or_refused(place: int, bit: int, layout: MessageLayout) -> None:
    dim = layout.dim
    sent = torch.arange(dim) % 3 == 0
    parts = {
        "gradient": torch.ones(dim) * sent,
        "sent": sent,
        "scales": torch.ones(3),
        "codes": torch.ones(dim, dtype=torch.int32),
        "full": torch.tensor(True),
        "multiplier": torch.tensor(1.0),
        "last": torch.ones(dim),
    }
    message = bytearray(layout.codec.encode(parts))
    message[place % len(message)] ^= 1 << bit
    try:
        read = layout.decode({ENCODED: torch.frombuffer(message, dtype=torch.uint8)})
    except UserError:
        return
    assert read.vectors.shape == (1, dim)


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
