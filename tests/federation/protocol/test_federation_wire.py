"""Blocks survive the journey, and a block from a stranger never gets further than a WireError."""

from __future__ import annotations

import json
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trilemma.federation.protocol import kinds, wire

ANSWER = kinds.Answer(client=1, run="run", epoch=0, round=2)


@pytest.mark.parametrize("dtype", list(wire.DTYPES.values()))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (1, 0, 4)])
def test_tensors_survive(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    header, tensors = wire.loads(wire.dumps(ANSWER, {"a": tensor, "b": tensor}), kinds.Answer)
    assert header == ANSWER
    assert all(torch.equal(tensors[name], tensor) and tensors[name].dtype == dtype for name in "ab")


def test_float32_travels_bit_for_bit():
    bits = torch.tensor([0, 1, 0x7F800000, 0x7FC00000, -(2**31)], dtype=torch.int32)
    _, tensors = wire.loads(wire.dumps(ANSWER, {"x": bits.view(torch.float32)}), kinds.Answer)
    assert torch.equal(tensors["x"].view(torch.int32), bits)


def test_a_vector_costs_four_bytes_a_number():
    assert len(wire.dumps(ANSWER, {"vector": torch.zeros(100_000)})) < 4 * 100_000 + 300


def test_shared_memory_is_written_once():
    momentum = torch.arange(6.0).reshape(1, 6)
    tensors = {"vector": momentum[0], "state": momentum, "other": momentum.clone(), "part": momentum[0, :3]}
    block = wire.dumps(ANSWER, tensors)
    assert len(block) < len(wire.dumps(ANSWER, {name: tensor.clone() for name, tensor in tensors.items()}))
    _, read = wire.loads(block, kinds.Answer)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    transposed = torch.arange(4.0).reshape(2, 2)
    _, read = wire.loads(wire.dumps(ANSWER, {"a": transposed, "b": transposed.T}), kinds.Answer)
    assert torch.equal(read["b"], transposed.T)


def test_types_that_do_not_travel_are_refused():
    with pytest.raises(wire.WireError, match="complex64"):
        wire.dumps(ANSWER, {"x": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize("epoch", [-1, 1 << 31, 10**400])
def test_a_number_that_no_file_holds_is_refused(epoch):
    block = wire.dumps(kinds.Hello(run="run", epoch=7, terms="t"))
    fields = json.loads(block[len(wire.MAGIC) + 8 :])
    fields["fields"]["epoch"] = epoch
    header = json.dumps(fields).encode()
    with pytest.raises(wire.WireError):
        wire.loads(wire.MAGIC + len(header).to_bytes(8, "big") + header, kinds.Hello)


def test_a_shape_that_no_tensor_has_is_refused():
    """Sizes whose product no machine can hold are no shape, not even of nothing: [2**39, 2**39, 0]."""
    whole = wire.dumps(ANSWER, {"x": torch.zeros(0)})
    for shape in ([2**39, 2**39, 0], [0, 2**39, 2**39], [2**20] * 3):
        header = json.loads(whole[len(wire.MAGIC) + 8 :])
        header["tensors"] = [["x", "float32", shape]]
        text = json.dumps(header).encode()
        with pytest.raises(wire.WireError):
            wire.loads(wire.MAGIC + len(text).to_bytes(8, "big") + text, kinds.Answer)


@given(st.binary(max_size=200))
def test_noise_is_refused(block):
    with pytest.raises(wire.WireError):
        wire.loads(block, kinds.Answer)


@given(st.data())
def test_a_damaged_block_is_refused_or_well_typed(data):
    block = bytearray(wire.dumps(ANSWER, {"vector": torch.arange(5.0)}))
    position = data.draw(st.integers(0, len(block) - 1))
    block[position] = data.draw(st.integers(0, 255))
    try:
        header, tensors = wire.loads(bytes(block), kinds.Answer)
    except wire.WireError:
        return
    assert isinstance(header.round, int)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())


@given(st.integers(0, 500))
def test_a_shortened_block_is_refused(length):
    block = wire.dumps(ANSWER, {"vector": torch.arange(5.0)})
    if length < len(block):
        with pytest.raises(wire.WireError):
            wire.loads(block[:length], kinds.Answer)


def forged(**changes):
    header = {"kind": "answer", "fields": ANSWER.model_dump(), "tensors": [["vector", "float32", [2]]]}
    text = json.dumps(header | changes).encode()
    return wire.MAGIC + len(text).to_bytes(8, "big") + text + bytes(8)


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        (forged(tensors=[["vector", "float32", [1 << 39]]]), "as long as"),
        (forged(tensors=[["vector", "float32", [-2]]]), "sizes"),
        (forged(tensors=[["vector", "float32", [2.0]]]), "sizes"),
        (forged(tensors=[["vector", "float32", [1] * 9]]), "at most 8"),
        (forged(tensors=[["vector", "object", [2]]]), "header"),
        (forged(fields={"client": 1}), "header"),
        (forged(fields=ANSWER.model_dump() | {"round": "2"}), "header"),
        (forged(fields=ANSWER.model_dump() | {"extra": 1}), "header"),
        (forged(tensors=[["vector", "float32", [2], 0]]), "an earlier one"),
        (forged(tensors=[["a", "float32", [2]], ["vector", "float32", [3], 0]]), "equally long"),
        (forged(tensors=[["a", "float32", [2]], ["vector", "float32", [2], 0, 0]]), "header"),
        (forged(tensors=[["a", "float32", [2]], ["vector", "float32", [2], -1]]), "an earlier one"),
        (forged(tensors=[["vector"]]), "header"),
        (forged(tensors=7), "header"),
        (forged(kind="ask"), "'ask' where 'answer'"),
        (wire.MAGIC + (1 << 62).to_bytes(8, "big") + b"{}", "longer than the block"),
        (b"trilemma/3\n" + bytes(30), "version"),
    ],
)
def test_forgeries_are_named(block, complaint):
    with pytest.raises(wire.WireError, match=complaint):
        wire.loads(block, kinds.Answer)


def test_the_limit_is_checked_first():
    with pytest.raises(wire.WireError, match="at most 100 are allowed"):
        wire.loads(bytes(101), kinds.Answer, limit=100)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_sealed_file_is_read_where_it_lies(tmp_path, odd):
    """Where somebody else wrote it numbers may begin at an odd address: those are copied."""
    block = wire.dumps(kinds.Noted(client=3, run="r"), {"x": torch.arange(5.0), "y": torch.arange(3)})
    start = len(wire.MAGIC) + 8
    length = int.from_bytes(block[len(wire.MAGIC) : start], "big")
    header = block[start : start + length] + b" " * odd
    block = wire.MAGIC + len(header).to_bytes(8, "big") + header + block[start + length :]
    content = wire.sealed(block)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for one in (content, mapped):
        assert bytes(wire.unsealed(one)) == block
        _, tensors = wire.loads(wire.unsealed(one), kinds.Noted)
        assert tensors["x"].tolist() == [0, 1, 2, 3, 4]
        assert tensors["y"].tolist() == [0, 1, 2]
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in tensors.values())
    with pytest.raises(wire.WireError, match="its checksum is another"):
        wire.unsealed(content[:-1] + b"x")
    with pytest.raises(wire.WireError, match="no checksum"):
        wire.unsealed(block)
