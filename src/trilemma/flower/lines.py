"""The two ends of a guard: a connection that somebody opened, and one to the SuperLink behind.

Both pass bodies on in pieces, and wait while the other side does not take them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import h11

CHUNK = 1 << 16
LARGEST_HEAD = 1 << 14
UPSTREAM_REUSE = 60.0
"""Seconds for which a silent connection to the SuperLink is used again; it closes them some time later."""
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)


@dataclass
class Line:
    """A connection with h11's idea of where it stands."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    state: h11.Connection
    used: float = field(default_factory=time.monotonic)

    async def event(self) -> h11.Event | type:
        """Return what comes next."""
        while True:
            event = self.state.next_event()
            if not isinstance(event, type) or event is h11.PAUSED:
                return event
            self.state.receive_data(await self.reader.read(CHUNK))

    async def send(self, event: h11.Event) -> None:
        """Send, and wait while the other side does not take it."""
        if data := self.state.send(event):
            self.writer.write(data)
            await self.writer.drain()

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body that is coming in."""
        while not isinstance(event := await self.event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise h11.RemoteProtocolError("it ended in the middle of a body")
            yield bytes(event.data)

    def close(self) -> None:
        """Close at once; nobody waits for a peer's goodbye."""
        with contextlib.suppress(Exception):
            self.writer.transport.abort()


class UpstreamGone(Exception):
    """The SuperLink closed the connection, or does not listen."""


class Upstream:
    """A peer's connection to the SuperLink, opened when it is needed."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._port, self._context = port, context
        self._line: Line | None = None

    async def ask(self, request: h11.Request) -> None:
        """Begin a request."""
        line = self._line
        if line is None or time.monotonic() - line.used > UPSTREAM_REUSE or line.reader.at_eof():
            self.close()
            try:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", self._port, ssl=self._context, server_hostname="localhost", limit=CHUNK
                )
            except (OSError, ssl.SSLError) as error:
                raise UpstreamGone(type(error).__name__) from None
            writer.transport.set_write_buffer_limits(high=2 * CHUNK)
            self._line = Line(
                reader, writer, h11.Connection(h11.CLIENT, max_incomplete_event_size=LARGEST_HEAD)
            )
        kept = [(head, value) for head, value in request.headers if head not in HOP_BY_HOP]
        await self.send(h11.Request(method=request.method, target=request.target, headers=kept))

    async def send(self, event: h11.Event) -> None:
        """Send a piece of a request."""
        assert self._line is not None
        try:
            await self._line.send(event)
        except OSError as error:
            raise UpstreamGone(type(error).__name__) from None

    async def answer(self) -> h11.Response:
        """Return the head of the answer."""
        assert self._line is not None
        try:
            event = await self._line.event()
        except (OSError, h11.RemoteProtocolError) as error:
            raise UpstreamGone(type(error).__name__) from None
        if not isinstance(event, h11.Response):
            raise UpstreamGone("no answer")
        return event

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body of the answer; the connection may then be used again."""
        assert self._line is not None
        async for piece in self._line.body():
            yield piece
        if self._line.state.our_state is h11.DONE and self._line.state.their_state is h11.DONE:
            self._line.state.start_next_cycle()
            self._line.used = time.monotonic()
        else:
            self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._line is not None:
            self._line.close()
            self._line = None
