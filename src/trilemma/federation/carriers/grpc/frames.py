"""One message of a stream: what it is, which question it belongs to, a number, a checksum, and bytes.

    frame = kind (1 byte) · question (16) · number (8) · CRC-32 of the payload (4) · payload

    server → client   BEGIN    a question of `number` bytes: SHA-256, seconds it may take, all of it if short
    client → server   HAVE     `number` pieces of it are here: send the next ones
    server → client   PIECE    piece `number`
    client → server   BEGIN    an answer, carried the same way: HAVE and PIECE with the roles exchanged
    client → server   REFUSED  an answer that is a refusal: begun like any other, its content is the text
    server → client   FORGET   nobody waits for this question or its answer any more

TLS keeps strangers' hands off the bytes. The checksums find what memory and disks change.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from trilemma.base.errors import UserError

BEGIN, HAVE, PIECE, REFUSED, FORGET = range(1, 6)

PIECE_BYTES = 1 << 20
"""Bytes of a block that travel in one frame."""

_HEAD = struct.Struct(">B16sQI")
_BEGINNING = struct.Struct(">32sd")

ROOM = _HEAD.size + _BEGINNING.size
"""Bytes that a frame may have beside a piece."""


class BadFrameError(UserError):
    """What the other side sent is none of what it may send."""


@dataclass(frozen=True)
class Frame:
    """A message that was read. `sound` tells whether its payload is as it was sent."""

    kind: int
    question: bytes
    number: int
    payload: memoryview
    sound: bool


@dataclass(frozen=True)
class Beginning:
    """What a BEGIN frame says about a block; `content` is all of it where it is short."""

    length: int
    digest: bytes
    lifetime: float
    content: memoryview


def encode(kind: int, question: bytes, number: int = 0, payload: Sequence[bytes | memoryview] = ()) -> bytes:
    """Return a frame, its payload given in parts.

    >>> frame = decode(encode(PIECE, bytes(16), 3, [b"some", b"thing"]))
    >>> frame.number, bytes(frame.payload), frame.sound
    (3, b'something', True)
    """
    checksum = 0
    for part in payload:
        checksum = zlib.crc32(part, checksum)
    return b"".join((_HEAD.pack(kind, question, number, checksum), *payload))


def decode(message: bytes) -> Frame:
    """Read a frame; refuse what is none.

    >>> decode(b"gibberish")
    Traceback (most recent call last):
    trilemma.federation.carriers.grpc.frames.BadFrameError: a message of 9 bytes is no frame
    """
    if len(message) < _HEAD.size:
        raise BadFrameError(f"a message of {len(message)} bytes is no frame")
    kind, question, number, checksum = _HEAD.unpack_from(message)
    if not BEGIN <= kind <= FORGET:
        raise BadFrameError(f"there is no kind {kind} of frame")
    payload = memoryview(message)[_HEAD.size :]
    return Frame(kind, question, number, payload, zlib.crc32(payload) == checksum)


def beginning(digest: bytes, lifetime: float) -> bytes:
    """Return what a BEGIN frame's payload begins with."""
    return _BEGINNING.pack(digest, lifetime)


def read_beginning(frame: Frame) -> Beginning:
    """Read what a BEGIN or REFUSED frame says; refuse one that contradicts itself."""
    if not frame.sound or len(frame.payload) < _BEGINNING.size:
        raise BadFrameError("a block begins with its length, its checksum and its time")
    digest, lifetime = _BEGINNING.unpack_from(frame.payload)
    content = frame.payload[_BEGINNING.size :]
    if len(content) != (frame.number if frame.number <= PIECE_BYTES else 0):
        raise BadFrameError(f"{len(content)} bytes came with the beginning of a block of {frame.number}")
    if not 0 <= lifetime < float("inf"):
        raise BadFrameError("a question's time is a number of seconds")
    return Beginning(frame.number, digest, lifetime, content)
