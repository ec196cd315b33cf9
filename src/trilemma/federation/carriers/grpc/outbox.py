"""What is to be sent on one stream: short frames first, then the pieces of one block after the other.

gRPC takes the next frame when it has sent the one before: a reader that is slow holds up its own stream, and
of what it has not read one piece is in memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from trilemma.federation.carriers.grpc import frames
from trilemma.federation.carriers.grpc.frames import BadFrameError
from trilemma.federation.carriers.grpc.transfers import Outgoing

MOST = 256
"""Frames that may wait for a reader: one that makes us say more than it reads is no honest one."""


class Outbox:
    """An iterator of frames, which waits for what others put into it and ends when it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._blocks: dict[bytes, Outgoing] = {}
        self._closed = False

    def say(self, kind: int, question: bytes, number: int = 0) -> None:
        """Send a frame without a payload."""
        self._put(frames.encode(kind, question, number))

    def carry(self, block: Outgoing) -> None:
        """Send a block; of a long one its beginning, until the receiver says what it has."""
        with self._changed:
            if block.block.length > frames.PIECE_BYTES:
                self._blocks[block.question] = block
        self._put(block.begin())

    def go_on(self, question: bytes, place: int) -> None:
        """Send a block's pieces from `place` on; nothing where it is not one of those under way."""
        with self._changed:
            if block := self._blocks.get(question):
                block.next = place
                self._changed.notify_all()

    def forget(self, question: bytes) -> None:
        """Send no more of a block."""
        with self._changed:
            self._blocks.pop(question, None)

    def close(self) -> None:
        """End the stream; what was not sent is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, frame: bytes) -> None:
        with self._changed:
            if len(self._frames) >= MOST:
                raise BadFrameError(f"{MOST} frames wait for a reader that does not read")
            self._frames.append(frame)
            self._changed.notify_all()

    def _next(self) -> Outgoing | None:
        return next((block for block in self._blocks.values() if block.waits), None)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._frames or self._next())
                if self._closed:
                    return
                block = None if self._frames else self._next()
                frame = self._frames.popleft() if block is None else block.piece()
            yield frame
