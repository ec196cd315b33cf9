"""Blocks too long for one message: announced by checksums, carried in pieces, kept on disk at both ends.

    server → client    long            a question's length and the checksums of its pieces
    client → server    have            how many of them are here: none, or those from before something broke
    server → client    piece           the next one; the client says again what it has
    server → client    long            once more, when all are there: now it is answered
    client → server    long            an answer's length and checksums, where that is long too
    server → client    fetch           one piece after the other; those that are here are not asked for

Every exchange can be repeated. A transfer that breaks, at either end, goes on where it stopped: pieces are in
files, in order, and each was compared with its checksum before it was written. What one party holds of one
transfer in memory is one piece. A length is judged before anything is stored, and each end keeps one block
that arrives and one that leaves; a client also what it has of the question before, until it has the new one.
The same broadcast asked anew, in another epoch, differs in its first piece: the others are here already.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trilemma.base import files
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.sizes import ROOM

BYTES = "bytes"
"""The tensor that holds a piece."""

Whole = bytes | Sequence[bytes | memoryview]
"""A block, or its parts, which need not be together in memory."""


def described(*parts: wire.Block) -> kinds.Long:
    """Return the announcement of a block, which may come in several parts.

    >>> block = b"ab" * wire.PIECE
    >>> described(block) == described(block[:5], block[5:])
    True
    """
    length, checksums, checksum = 0, [], hashlib.sha256()
    for part in parts:
        view, start = memoryview(part), 0
        while start < len(view):
            if length % wire.PIECE == 0:
                checksum = hashlib.sha256()
            stop = min(len(view), start + wire.PIECE - length % wire.PIECE)
            checksum.update(view[start:stop])
            length, start = length + stop - start, stop
            if length % wire.PIECE == 0:
                checksums.append(checksum.hexdigest())
    if length % wire.PIECE:
        checksums.append(checksum.hexdigest())
    return kinds.Long(length=length, checksums=checksums)


def piece_of(block: wire.Block, digest: str, place: int) -> bytes:
    """Return the message with a piece of a block."""
    if not 0 <= place * wire.PIECE < len(block):
        raise wire.WireError(f"a block of {len(block)} bytes has no piece {place}")
    piece = bytearray(memoryview(block)[place * wire.PIECE : (place + 1) * wire.PIECE])
    return wire.dumps(
        kinds.Piece(digest=digest, place=place), {BYTES: torch.frombuffer(piece, dtype=torch.uint8)}
    )


def check_announcement(long: kinds.Long, limit: int) -> None:
    """Refuse an announcement of a block longer than `limit`, or one that contradicts itself."""
    if not 0 < long.length <= limit:
        raise wire.WireError(f"{long.length} bytes announced where at most {limit} are allowed")
    if len(long.checksums) != -(-long.length // wire.PIECE):
        raise wire.WireError(f"{len(long.checksums)} checksums of {long.length} bytes")


@dataclass(frozen=True)
class Arriving:
    """A block on its way: a file with the pieces that have come, in order.

    Pieces that are the same, at the same place, in the file `former` need not come.
    """

    long: kinds.Long
    path: Path
    former: Path | None = None

    @property
    def have(self) -> int:
        """How many pieces are here, whole."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        return len(self.long.checksums) if size >= self.long.length else size // wire.PIECE

    @property
    def complete(self) -> bool:
        """Whether all are."""
        return self.have == len(self.long.checksums)

    def compare(self) -> None:
        """Begin anew where what is here, from before a crash perhaps, is not as it was announced."""
        whole = range(0, self.have * wire.PIECE, wire.PIECE)
        if not whole:
            return
        with self.path.open("rb") as file:
            found = [hashlib.sha256(file.read(wire.PIECE)).hexdigest() for _ in whole]
        if found != self.long.checksums[: len(found)]:
            self.path.unlink()  # and not cut off: somebody may look at it

    def take(self, block: wire.Block) -> None:
        """Add the next piece; refuse one that is not as announced. One that is here already is not needed."""
        header, tensors = wire.loads(block, kinds.Piece, limit=wire.PIECE + ROOM)
        have = self.have
        if header.digest != self.long.digest or header.place > have or set(tensors) != {BYTES}:
            raise wire.WireError(f"piece {header.place} of another block, or out of turn")
        if header.place < have:
            return
        content = tensors[BYTES].numpy().tobytes()
        if not self._fits(content):
            raise wire.WireError(f"piece {have} is not as it was announced")
        while content and self._fits(content):
            self._append(content)
            content = b"" if self.complete else self._found_before()

    def _fits(self, content: bytes) -> bool:
        """Tell whether this is the next piece: as long as it must be, or it would be next again."""
        have = self.have
        length = min(wire.PIECE, self.long.length - have * wire.PIECE)
        return 0 < len(content) == length and hashlib.sha256(content).hexdigest() == self.long.checksums[have]

    def _found_before(self) -> bytes:
        """Return what stands in the place of the next piece in the former block; nothing without one."""
        if self.former is None or not self.former.is_file():
            return b""
        with self.former.open("rb") as file:
            file.seek(self.have * wire.PIECE)
            return file.read(wire.PIECE)

    def _append(self, content: bytes) -> None:
        have = self.have
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.truncate(have * wire.PIECE)  # a crash may have left a part of it
            file.seek(0, 2)
            file.write(content)

    def mapped(self, access: int = mmap.ACCESS_READ) -> mmap.mmap:
        """Return the whole block, as it lies in its file."""
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=access)


@dataclass(frozen=True)
class LongBlocks:
    """A client's end, in `folder`. `limit` says how long a question may be, before anything is stored.

    What a client answers is in `leaving` for as long as it is the last long answer. Whoever fetches it gets
    what was answered before, and nothing else.
    """

    folder: Path
    limit: Callable[[], int]

    def answer(self, kind: str, block: wire.Block, handle: Callable[[wire.Block], Whole]) -> bytes:
        """Answer a block by `handle`, or a part of the carrying of one."""
        if kind == kinds.Long.kind:
            long, _ = wire.loads(block, kinds.Long, limit=wire.LARGEST_HEADER)
            check_announcement(long, self.limit())
            arriving = self._arriving(long)
            if not arriving.complete:
                return self._have(arriving)
            self._former.unlink(missing_ok=True)
            # Where it lies, but its own copy for who writes to it: a model's code is not ours.
            whole = arriving.mapped(mmap.ACCESS_COPY)
            if described(whole) != long:  # the disk changed it
                arriving.path.unlink()
                return self._have(arriving)
            return self._leave(handle(whole))
        if kind == kinds.Piece.kind:
            arriving = self._expected()
            arriving.take(block)
            return self._have(arriving)
        if kind == kinds.Fetch.kind:
            fetch, _ = wire.loads(block, kinds.Fetch, limit=ROOM)
            path = self.folder / "leaving" / fetch.digest
            if fetch.digest not in {one.name for one in path.parent.glob("*")}:
                raise wire.WireError("nothing of that name is to be had")
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return piece_of(content, fetch.digest, fetch.place)
        return self._leave(handle(block))

    def _have(self, arriving: Arriving) -> bytes:
        return wire.dumps(kinds.Have(digest=arriving.long.digest, pieces=arriving.have))

    def _arriving(self, long: kinds.Long) -> Arriving:
        """Return the block that is announced; what is here of the one before it is kept for a while."""
        folder, own = self.folder / "arriving", {long.digest, f"{long.digest}.long"}
        for path in folder.glob("*"):
            if path.name not in own and path != self._former and path.suffix != ".long":
                path.replace(self._former)
        only(folder, {*own, self._former.name})
        files.write_atomically(folder / f"{long.digest}.long", wire.dumps(long))
        return Arriving(long, folder / long.digest, self._former)

    @property
    def _former(self) -> Path:
        return self.folder / "arriving" / "former"

    def _expected(self) -> Arriving:
        """Return the block that was announced last."""
        for path in (self.folder / "arriving").glob("*.long"):
            long, _ = wire.loads(path.read_bytes(), kinds.Long)
            return Arriving(long, path.with_suffix(""), self._former)
        raise wire.WireError("a piece of a block that nobody announced")

    def _leave(self, answer: Whole) -> bytes:
        """Return an answer, or its announcement where it is long."""
        parts = [answer] if isinstance(answer, bytes) else answer
        if sum(map(len, parts)) <= wire.PIECE:
            return b"".join(parts)
        long = described(*parts)
        only(self.folder / "leaving", {long.digest})
        path = self.folder / "leaving" / long.digest
        if not path.is_file() or path.stat().st_size != long.length:
            files.write_atomically(path, *parts, secret=True)
        return wire.dumps(long)


def only(folder: Path, names: set[str]) -> None:
    """Delete what is in a folder but these."""
    for path in folder.glob("*"):
        if path.name not in names:
            path.unlink(missing_ok=True)
