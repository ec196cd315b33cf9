"""The byte formats of compressed gradients, and their lengths.

What sender and receiver both know (dimension, buckets, levels) is not sent. Numbers are little-endian.

    dense       D float32
    quantised   one float32 scale per bucket, then D codes of b bits: sign and level, packed without gaps
    sparse      a byte saying how positions are written (bitmap, or gaps as base-128 integers, whichever is
                shorter), a uint32 count, the positions, then the values as float32

`*_bytes` return the lengths of k messages at once, without encoding them; tests compare them with
`len(encode(…))`. Decoders read untrusted bytes: they check the length before they allocate anything, check
all ranges, and raise a `UserError` for what does not fit.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import UserError

_HEADER = struct.Struct("<BI")
_BITMAP, _GAPS = 0, 1


def encode_dense(vector: Tensor) -> bytes:
    """Return D float32 numbers.

    >>> len(encode_dense(torch.zeros(21)))
    84
    """
    return vector.detach().cpu().numpy().astype("<f4").tobytes()


def decode_dense(message: bytes) -> Tensor:
    """Undo `encode_dense`."""
    if len(message) % 4:
        raise UserError(f"float32 numbers take 4 bytes each, got {len(message)} bytes")
    return torch.from_numpy(np.frombuffer(message, "<f4").astype(np.float32))


@dataclass(frozen=True)
class Quantised:
    """One quantised vector: `scales` (buckets,), signed `codes` (D,) in −(levels−1) … levels−1."""

    scales: Tensor
    codes: Tensor


@dataclass(frozen=True)
class QuantisedFormat:
    """What both sides know about quantised messages: their dimension, bucket size and number of levels.

    >>> layout = QuantisedFormat(dim=610, bucket=500, levels=5)
    >>> layout.buckets, layout.bits, layout.size, layout.scalars
    (2, 4, 313, 78.25)
    """

    dim: int
    bucket: int
    levels: int

    def __post_init__(self) -> None:
        if self.levels < 2 or self.bucket < 1:
            raise UserError(
                "quantisation needs at least 2 levels and buckets of at least 1, "
                f"got {self.levels} and {self.bucket}"
            )

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return math.ceil(self.dim / self.bucket)

    @property
    def bits(self) -> int:
        """Bits of one code: a sign and the level."""
        return 1 + math.ceil(math.log2(self.levels))

    @property
    def size(self) -> int:
        """Length of a message in bytes."""
        return 4 * self.buckets + math.ceil(self.dim * self.bits / 8)

    @property
    def scalars(self) -> float:
        """Length in float32 numbers, not rounded up: (D·bits + 32·buckets)/32."""
        return (self.dim * self.bits + 32 * self.buckets) / 32

    def encode(self, message: Quantised) -> bytes:
        """Return scales, then packed codes."""
        codes = message.codes.cpu().numpy().astype(np.int64)
        words = (codes < 0).astype(np.uint64) | (np.abs(codes).astype(np.uint64) << np.uint64(1))
        table = (words[:, None] >> np.arange(self.bits, dtype=np.uint64)) & np.uint64(1)
        packed = np.packbits(table.astype(np.uint8).ravel(), bitorder="little")
        return encode_dense(message.scales) + packed.tobytes()

    def decode(self, message: bytes) -> Quantised:
        """Undo `encode`."""
        if len(message) != self.size:
            raise UserError(f"a quantised message is {self.size} bytes long here, got {len(message)}")
        cut = 4 * self.buckets
        flat = np.unpackbits(
            np.frombuffer(message[cut:], np.uint8), count=self.dim * self.bits, bitorder="little"
        )
        words = flat.reshape(self.dim, self.bits).astype(np.int64) @ (1 << np.arange(self.bits))
        codes = np.where(words & 1, -(words >> 1), words >> 1).astype(np.int32)
        scales = decode_dense(message[:cut])
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            raise UserError("the scale of a bucket is a finite number, at least 0")
        if np.abs(codes).max(initial=0) >= self.levels:
            raise UserError(f"codes of {self.levels} levels lie within ±{self.levels - 1}")
        return Quantised(scales, torch.from_numpy(codes))


def encode_sparse(vector: Tensor, mask: Tensor) -> bytes:
    """Return the coordinates of `vector` (D,) where `mask` is set.

    >>> v = torch.tensor([0.0, 2.5, 0.0, -1.0])
    >>> message = encode_sparse(v, v != 0)
    >>> len(message), decode_sparse(message, 4)[0].tolist()
    (14, [0.0, 2.5, 0.0, -1.0])
    """
    chosen = mask.cpu().numpy()
    positions = np.flatnonzero(chosen)
    gaps = _gaps(positions)
    if int(_varint_sizes(gaps).sum()) < math.ceil(len(chosen) / 8):
        form, where = _GAPS, _varints(gaps)
    else:
        form, where = _BITMAP, np.packbits(chosen, bitorder="little").tobytes()
    values = vector.detach().cpu().numpy()[positions].astype("<f4").tobytes()
    return _HEADER.pack(form, len(positions)) + where + values


def decode_sparse(message: bytes, dim: int) -> tuple[Tensor, Tensor]:
    """Undo `encode_sparse`: return the vector (dim,), zero where nothing was sent, and where it was."""
    if len(message) < _HEADER.size:
        raise UserError(f"a sparse message begins with {_HEADER.size} bytes, got {len(message)} in all")
    form, count = _HEADER.unpack_from(message)
    cut = len(message) - 4 * count
    if form not in (_BITMAP, _GAPS) or count > dim or cut < _HEADER.size:
        raise UserError(f"a sparse message of {count} coordinates does not fit a vector of {dim}")
    body = message[_HEADER.size : cut]
    positions = _read_gaps(body, count) if form == _GAPS else _read_bitmap(body, dim)
    if len(positions) != count or (count and positions[-1] >= dim):
        raise UserError(f"a sparse message of {count} coordinates does not fit a vector of {dim}")
    vector, sent = torch.zeros(dim), torch.zeros(dim, dtype=torch.bool)
    where = torch.from_numpy(positions)
    vector[where] = decode_dense(message[cut:])
    sent[where] = True
    return vector, sent


def longest_sparse(dim: int) -> int:
    """Return the length of the longest sparse message: every coordinate is sent, positions are a bitmap.

    >>> longest_sparse(300) == len(encode_sparse(torch.ones(300), torch.ones(300, dtype=torch.bool)))
    True
    """
    return _HEADER.size + math.ceil(dim / 8) + 4 * dim


def sparse_bytes(mask: Tensor) -> Tensor:
    """Return the length of `encode_sparse` for k messages, from which coordinates are sent (k, D).

    >>> sparse_bytes(torch.tensor([[False, True, False, True], [False] * 4])).tolist()
    [14, 5]
    """
    clients, dim = mask.shape
    rows, columns = mask.nonzero(as_tuple=True)
    count = mask.sum(1)
    before = torch.cat([columns.new_full((1,), -1), columns[:-1]])
    first = torch.cat([rows.new_full((1,), -1), rows[:-1]]) != rows
    gaps = columns - torch.where(first, -1, before) - 1
    sizes = torch.ones_like(gaps)
    for group in range(1, 5):
        sizes += gaps >= 1 << 7 * group
    varints = torch.zeros(clients, dtype=torch.int64, device=mask.device).index_add_(0, rows, sizes)
    return _HEADER.size + varints.clamp(max=math.ceil(dim / 8)) + 4 * count


def _gaps(positions: np.ndarray) -> np.ndarray:
    """How many coordinates are skipped before each one that is sent."""
    return np.diff(positions, prepend=-1) - 1


def _varint_sizes(values: np.ndarray) -> np.ndarray:
    sizes = np.ones_like(values)
    for group in range(1, 5):
        sizes += values >= 1 << 7 * group
    return sizes


def _varints(values: np.ndarray) -> bytes:
    """Write base-128 integers, least significant group first, the top bit set on all but the last byte."""
    sizes = _varint_sizes(values)
    out = np.zeros(int(sizes.sum()), np.uint8)
    starts = np.cumsum(sizes) - sizes
    for group in range(int(sizes.max(initial=0))):
        there = sizes > group
        more = (sizes[there] > group + 1).astype(np.uint8) << 7
        out[starts[there] + group] = ((values[there] >> 7 * group) & 0x7F).astype(np.uint8) | more
    return out.tobytes()


def _read_bitmap(data: bytes, dim: int) -> np.ndarray:
    """Return the positions of a bitmap of `dim` bits; bits beyond are none of its business, and are zero."""
    if len(data) != math.ceil(dim / 8):
        raise UserError(f"a bitmap of {dim} positions takes {math.ceil(dim / 8)} bytes, got {len(data)}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[dim:].any():
        raise UserError(f"a bitmap of {dim} positions has no others")
    return np.flatnonzero(bits)


def _read_gaps(data: bytes, count: int) -> np.ndarray:
    """Return the positions that `count` gaps lead to."""
    raw = np.frombuffer(data, np.uint8).astype(np.int64)
    last = raw < 128
    if int(last.sum()) != count or (count and not last[-1]) or (not count and len(raw)):
        raise UserError(f"the gaps before {count} coordinates cannot be read")
    if not count:
        return raw
    number: np.ndarray = np.cumsum(last) - last
    start = np.flatnonzero(np.concatenate([[True], last[:-1]]))
    group = np.arange(len(raw)) - start[number]
    if group.max() > 4:
        raise UserError("a gap is written in at most five bytes")
    values = np.zeros(count, np.int64)
    np.add.at(values, number, (raw & 0x7F) << 7 * group)
    return np.cumsum(values + 1) - 1
