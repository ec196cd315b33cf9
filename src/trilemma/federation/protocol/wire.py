"""What travels: a typed header and raw tensors, in one versioned block of bytes.

    block  = magic · length of header (8 bytes, big-endian) · header · tensor bytes, concatenated
    header = JSON of {"fields": …, "tensors": [[name, dtype, shape], …]}, spaces up to a multiple of 64 bytes,
             of 4096 in a long block

A tensor that shares its memory with an earlier one (the momentum a client sends and keeps) is written once:
[name, dtype, shape, place of the earlier one].

A block is the only thing inside a message, whoever carries it. The same block is what a party writes to its
disk, there behind its SHA-256 (`sealed`): a disk may forget, and nobody else would notice. Reading checks
everything against the length before it allocates, and nothing read is ever executed: a block from a stranger
is either a well-typed value or a `WireError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.federation.protocol.kinds import Header

MAGIC = b"trilemma/2\n"
SEALED = b"trilemma/sealed/2".ljust(31) + b"\n"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
}
LARGEST_HEADER = 1 << 20
CHECKSUM = hashlib.sha256().digest_size
ALIGNED = 64
"""Tensors begin at a multiple of this, so that a file can be read where it lies."""

Block = bytes | memoryview | mmap.mmap
"""A block in memory, or in a file."""

Whole = bytes | Sequence[bytes | memoryview]
"""A block that was made: in one part or, where it is long, in parts that lie where they are."""


class WireError(UserError):
    """A block that is not what it should be."""


def together(whole: Whole) -> bytes:
    """Return a block that was made, in one part."""
    return whole if isinstance(whole, bytes) else b"".join(whole)


AnyHeader = TypeVar("AnyHeader", bound=Header)
Tensors = Mapping[str, Tensor]


def raw(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, where they lie.

    >>> raw(torch.tensor([65, 66], dtype=torch.uint8)).tobytes()
    b'AB'
    """
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data if plain.numel() else memoryview(b"")


def dumps(header: Header, tensors: Tensors | None = None) -> bytes:
    """Return the block of a header and tensors.

    >>> from trilemma.federation.protocol.kinds import Noted
    >>> block = dumps(Noted(client=3, run="r"), {"x": torch.arange(2, dtype=torch.float32)})
    >>> header, tensors = loads(block, Noted)
    >>> header.client, tensors["x"]
    (3, tensor([0., 1.]))
    """
    return b"".join(parts_of(header, tensors))


def parts_of(header: Header, tensors: Tensors | None = None) -> list[bytes | memoryview]:
    """Return a block in parts: its beginning, and the tensors' bytes where they lie."""
    parts: list[memoryview] = []
    described: list[list[object]] = []
    written: dict[tuple[int, int], int] = {}
    for name, tensor in (tensors or {}).items():
        plain = tensor.detach().cpu().contiguous()
        dtype = str(plain.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise WireError(f"cannot send {name!r} of type {dtype}; allowed: {', '.join(DTYPES)}")
        described.append([name, dtype, list(plain.shape)])
        where = (tensor.data_ptr(), plain.nbytes)
        if where in written and tensor.is_contiguous() and plain.numel():
            described[-1].append(written[where])
            continue
        if tensor.is_contiguous():
            written[where] = len(described) - 1
        parts.append(raw(plain))
    text = json.dumps({"kind": header.kind, "fields": header.model_dump(), "tensors": described}).encode()
    if len(text) > LARGEST_HEADER:
        raise WireError(f"a header of {len(text)} bytes could not be read again; at most {LARGEST_HEADER}")
    text += b" " * (-(len(MAGIC) + 8 + len(text)) % ALIGNED)
    return [MAGIC + len(text).to_bytes(8, "big") + text, *parts]


def loads(
    block: Block, expected: type[AnyHeader], limit: int | None = None
) -> tuple[AnyHeader, dict[str, Tensor]]:
    """Read a block of the expected kind; refuse it where it is anything else, or longer than `limit` bytes.

    The tensors of a block that is in a file stay there, and must not be written to.

    >>> from trilemma.federation.protocol.kinds import Noted
    >>> loads(b"gibberish", Noted)
    Traceback (most recent call last):
    trilemma.federation.protocol.wire.WireError: not a block of this version
    """
    if limit is not None and len(block) > limit:
        raise WireError(f"{len(block)} bytes where at most {limit} are allowed")
    header, shapes, sources, start = _beginning(block, expected)
    body = memoryview(block)[start:]
    sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in shapes]
    if sum(size for place, size in enumerate(sizes) if sources[place] == place) != len(body):
        raise WireError("the tensors are not as long as the header says")
    buffers: list[bytearray | memoryview] = []
    tensors: dict[str, Tensor] = {}
    in_a_file = isinstance(body.obj, mmap.mmap)
    for place, ((name, dtype, shape), size) in enumerate(zip(shapes, sizes, strict=True)):
        if sources[place] == place:
            stays = in_a_file and (not size or _address(body) % dtype.itemsize == 0)
            buffers.append(body[:size] if stays else bytearray(body[:size]))
            body = body[size:]
        else:
            buffers.append(buffers[sources[place]])
        tensors[name] = (
            _tensor(buffers[-1], dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        )
    return header, tensors


def read_file(path: Path, expected: type[AnyHeader]) -> tuple[AnyHeader, dict[str, Tensor]]:
    """Read a file that holds a block of the expected kind; what is wrong with it names the file.

    The block may be bare, as transcripts are.
    """
    content = path.read_bytes()
    try:
        return loads(unsealed(content) if content.startswith(SEALED) else content, expected)
    except WireError as error:
        raise WireError(f"{path}: {error}") from None


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


_Shapes = list[tuple[str, torch.dtype, tuple[int, ...]]]


def header_of(block: Block, expected: type[AnyHeader]) -> AnyHeader:
    """Read the header of a block of which only the beginning need be there."""
    return _beginning(block, expected)[0]


def _beginning(block: Block, expected: type[AnyHeader]) -> tuple[AnyHeader, _Shapes, list[int], int]:
    """Return header, shapes of the tensors, where each one's bytes are, and where they begin."""
    start = len(MAGIC) + 8
    if bytes(block[: len(MAGIC)]) != MAGIC or len(block) < start:
        raise WireError("not a block of this version")
    length = int.from_bytes(block[len(MAGIC) : start], "big")
    if length > min(LARGEST_HEADER, len(block) - start):
        raise WireError("the header is longer than the block")
    try:
        raw = json.loads(bytes(block[start : start + length]))
        kind, fields, described = raw["kind"], raw["fields"], raw["tensors"]
        if kind != expected.kind:
            raise WireError(f"kind {kind!r} where {expected.kind!r} was expected")
        header = expected.model_validate(fields)
        shapes = [(str(one[0]), DTYPES[one[1]], shape_of(one[2])) for one in described]
        sources = [_source(shapes, place, one[3:]) for place, one in enumerate(described)]
    except (ValueError, LookupError, TypeError, RecursionError, ValidationError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"the header cannot be read ({type(error).__name__})") from None
    return header, shapes, sources, start + length


def _tensor(buffer: bytearray | memoryview, dtype: torch.dtype) -> Tensor:
    with warnings.catch_warnings():
        # A file is mapped for reading only; torch cannot express that and says so.
        warnings.filterwarnings("ignore", message=".*buffer is not writable")
        return torch.frombuffer(buffer, dtype=dtype)


def _source(shapes: _Shapes, place: int, rest: list[object]) -> int:
    """Return where the bytes of the tensor at `place` are: its own place, or an earlier one as long."""
    if not rest:
        return place
    (source,) = rest
    if type(source) is not int or not 0 <= source < place:
        raise WireError("a tensor can only share the bytes of an earlier one")
    lengths = [dtype.itemsize * math.prod(shape) for _, dtype, shape in (shapes[source], shapes[place])]
    if lengths[0] != lengths[1]:
        raise WireError("tensors that share their bytes are equally long")
    return source


def kind_of(block: Block) -> str:
    """Return what a block says it is, for the choice of who reads it; nothing else is checked.

    >>> from trilemma.federation.protocol.kinds import Noted
    >>> kind_of(dumps(Noted(client=3, run="r")))
    'noted'
    """
    start = len(MAGIC) + 8
    length = int.from_bytes(block[len(MAGIC) : start], "big")
    if bytes(block[: len(MAGIC)]) != MAGIC or length > min(LARGEST_HEADER, len(block) - start):
        raise WireError("not a block of this version")
    try:
        return str(json.loads(bytes(block[start : start + length]))["kind"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WireError("the header cannot be read") from None


def shape_of(shape: object) -> tuple[int, ...]:
    """Return a shape that was read; refuse what is none."""
    if not isinstance(shape, list) or len(shape) > 8:
        raise WireError("a shape is a list of at most 8 sizes")
    if not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
        raise WireError("a shape has sizes from 0 to 2**40")
    if math.prod(size for size in shape if size) >= 1 << 60:  # also where one of them is 0
        raise WireError("a tensor has fewer than 2**60 numbers")
    return tuple(shape)


def digest(block: Block) -> str:
    """Return a block's SHA-256."""
    return hashlib.sha256(block).hexdigest()


def sealed(block: bytes) -> bytes:
    """Return a block as it is written to a disk: behind its checksum.

    >>> bytes(unsealed(sealed(b"block")))
    b'block'
    """
    return b"".join(sealed_parts([block]))


def sealed_parts(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the parts of a block as they are written to a disk: behind their checksum."""
    checksum = hashlib.sha256()
    for part in parts:
        checksum.update(part)
    return [SEALED + checksum.digest(), *parts]


def unsealed(content: Block) -> memoryview:
    """Return the block that a file holds; refuse one that is not as it was written.

    >>> unsealed(sealed(b"block")[:-1])
    Traceback (most recent call last):
    trilemma.federation.protocol.wire.WireError: not as it was written: its checksum is another
    """
    block = unchecked(content)
    if hashlib.sha256(block).digest() != bytes(content[len(SEALED) : len(SEALED) + CHECKSUM]):
        raise WireError("not as it was written: its checksum is another")
    return block


def unchecked(content: Block) -> memoryview:
    """Return the block of a file, or the beginning of it, without comparing the checksum."""
    start = len(SEALED) + CHECKSUM
    if bytes(content[: len(SEALED)]) != SEALED or len(content) < start:
        raise WireError("not as it was written: it has no checksum")
    return memoryview(content)[start:]
