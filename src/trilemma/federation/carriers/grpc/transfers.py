"""A block on its way, in pieces: whoever sends it begins where whoever receives it says.

A block of more than a piece is announced by its length and its SHA-256; the receiver says how many pieces it
has, which after a broken line, or a restart of either side, are those that came before. In memory a block
that arrives lies once: pieces go where they belong, in anonymous memory or, from `IN_MEMORY` bytes on, in a
file that is mapped when it is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trilemma.federation.carriers.grpc import frames
from trilemma.federation.carriers.grpc.frames import PIECE_BYTES, BadFrameError, Frame

IN_MEMORY = 1 << 24
"""Bytes up to which a block that arrives lies in memory."""

REPEATS = 3
"""How often a piece, or the whole, may have to be sent again before the sender counts as broken."""

STRAY = 64
"""Pieces out of turn that are ignored: those that were on their way when the sender was asked to go back."""

GIVE_BACK = 5.0
"""Seconds after which free memory goes back to the system: connections and steps leave it in pieces."""

Whole = bytes | mmap.mmap | Sequence[bytes | memoryview]
"""A block, or its parts, which need not be together in memory."""

Arrived = bytes | mmap.mmap
"""A block that has come: short ones as bytes, others where they lie."""


@dataclass(frozen=True)
class DescribedBlock:
    """A block to be sent, its length and SHA-256; computed once for however many receive it.

    >>> block = DescribedBlock.of([b"a" * 1000, b"b" * PIECE_BYTES])
    >>> block.length, [len(b"".join(block.piece(place))) for place in range(block.pieces)]
    (1049576, [1048576, 1000])
    """

    parts: tuple[memoryview, ...]
    length: int
    digest: bytes

    @classmethod
    def of(cls, whole: Whole) -> DescribedBlock:
        """Describe a block."""
        parts = [whole] if isinstance(whole, bytes | mmap.mmap) else whole
        views = tuple(memoryview(part).cast("B") for part in parts)
        checksum = hashlib.sha256()
        for view in views:
            checksum.update(view)
        return cls(views, sum(map(len, views)), checksum.digest())

    @property
    def pieces(self) -> int:
        """In how many pieces it travels."""
        return -(-self.length // PIECE_BYTES)

    def piece(self, place: int) -> list[memoryview]:
        """Return a piece, in parts, where they lie."""
        start, stop = place * PIECE_BYTES, (place + 1) * PIECE_BYTES
        found: list[memoryview] = []
        for view in self.parts:
            if start < len(view) and stop > 0:
                found.append(view[max(start, 0) : stop])
            start, stop = start - len(view), stop - len(view)
        return found


@dataclass
class Outgoing:
    """A block on its way out: question or answer, and the piece to be sent next."""

    question: bytes
    block: DescribedBlock
    kind: int = frames.BEGIN
    lifetime: float = 0.0
    next: int | None = None

    def begin(self) -> bytes:
        """Return the frame it begins with. A long one waits until the receiver says what it has."""
        short = self.block.piece(0) if self.block.length <= PIECE_BYTES else []
        payload: list[bytes | memoryview] = [frames.beginning(self.block.digest, self.lifetime), *short]
        return frames.encode(self.kind, self.question, self.block.length, payload)

    @property
    def waits(self) -> bool:
        """Whether there is a piece to be sent now."""
        return self.next is not None and self.next < self.block.pieces

    def piece(self) -> bytes:
        """Return the next piece."""
        assert self.next is not None
        place, self.next = self.next, self.next + 1
        return frames.encode(frames.PIECE, self.question, place, self.block.piece(place))


class Incoming:
    """A block on its way in. What is in the file `path` from before is continued.

    >>> block = DescribedBlock.of(bytes(range(256)) * 5000)
    >>> incoming = Incoming(block.length, block.digest, None)
    >>> out = Outgoing(bytes(16), block, next=incoming.have)
    >>> while out.waits:
    ...     _ = incoming.take(frames.decode(out.piece()))
    >>> incoming.whole()[:] == bytes(range(256)) * 5000
    True
    """

    def __init__(self, length: int, digest: bytes, path: Path | None) -> None:
        self.length, self.digest, self.path = length, digest, path
        self.have, self._repeats, self._stray = 0, 0, 0
        self._checksum = hashlib.sha256()
        self._memory: mmap.mmap | None = None
        if path is None:
            self._memory = mmap.mmap(-1, length)
        else:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("ab+") as file:
                self._continue(file)

    @classmethod
    def of(cls, begun: frames.Beginning, folder: Path | None) -> Incoming:
        """Expect a block that was begun: in a file of `folder`, where it is long, in place of those before.

        Somebody may still look at one of those: so no other length is ever continued in its file.
        """
        path = None
        if folder is not None and begun.length > IN_MEMORY:
            path = folder / f"{begun.digest.hex()}-{begun.length}"
            for other in folder.glob("*"):
                if other != path:
                    other.unlink(missing_ok=True)
        return cls(begun.length, begun.digest, path)

    def _continue(self, file: BinaryIO) -> None:
        """Take what is in the file for what came before: as many whole pieces as there are."""
        size = file.seek(0, 2)
        self.have = self.pieces if size == self.length else min(size, self.length) // PIECE_BYTES
        file.truncate(min(self.have * PIECE_BYTES, self.length))
        file.seek(0)
        for _ in range(self.have):
            self._checksum.update(file.read(PIECE_BYTES))
        if self.have == self.pieces and not self.complete:  # not as it was when it was written
            self.have, self._checksum = 0, hashlib.sha256()

    @property
    def pieces(self) -> int:
        """In how many pieces it comes."""
        return -(-self.length // PIECE_BYTES)

    def take(self, frame: Frame) -> int | None:
        """Add a piece. Return from which one on the sender must send again, where it must."""
        if frame.number != self.have or self.complete:
            self._stray += 1
            if self._stray > STRAY:
                raise BadFrameError("pieces come in another order than they were asked for")
            return None
        start = self.have * PIECE_BYTES
        if not frame.sound:
            return self._again(self.have)
        if len(frame.payload) != min(PIECE_BYTES, self.length - start):
            raise BadFrameError(f"a piece of {len(frame.payload)} bytes")
        self._put(start, frame.payload)
        self._checksum.update(frame.payload)
        self.have += 1
        if self.have == self.pieces and self._checksum.digest() != self.digest:
            self._checksum = hashlib.sha256()
            return self._again(0)
        return None

    def _again(self, place: int) -> int:
        self.have, self._stray, self._repeats = place, 0, self._repeats + 1
        if self._repeats > REPEATS:
            raise BadFrameError("what came is not what was announced")
        return place

    def _put(self, start: int, content: memoryview) -> None:
        if self._memory is not None:
            self._memory[start : start + len(content)] = content
            return
        assert self.path is not None
        with self.path.open("r+b") as file:
            file.seek(start)
            file.write(content)

    @property
    def complete(self) -> bool:
        """Whether all of it is here."""
        return self.have == self.pieces and self._checksum.digest() == self.digest

    def whole(self, access: int = mmap.ACCESS_READ) -> mmap.mmap:
        """Return the block where it lies."""
        if self._memory is not None:
            return self._memory
        assert self.path is not None
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=access)


def check_short(begun: frames.Beginning) -> bytes:
    """Return the content of a block that came with its beginning."""
    content = bytes(begun.content)
    if hashlib.sha256(content).digest() != begun.digest:
        raise BadFrameError("what came is not what was announced")
    return content


def give_back() -> None:
    """Give free memory back, where the C library is one that keeps it (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
