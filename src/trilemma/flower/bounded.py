"""What a SuperNode takes of the server's answers: no more than it needs, and a broken line for what it is."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from trilemma.federation.sizes import PIECE, ROOM
from trilemma.flower.limits import MARGIN, WRAPPING

LARGEST = int(MARGIN * (PIECE + ROOM + WRAPPING))
"""Bytes that anything the server sends to a SuperNode may have: a piece, and a tenth more."""

ABOUT_CERTIFICATES = ("CERTIFICATE", "UNKNOWN_CA", "UNKNOWN CA")
"""What TLS says where one of the two does not accept who the other is: that mends itself by no new try."""


class Bounded(httpx.BaseTransport):
    """Takes no more of an answer than a SuperNode needs, whatever the server sends."""

    def __init__(self, transport: httpx.BaseTransport, largest: int = LARGEST) -> None:
        self._transport, self._largest = transport, largest

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Pass a request on; its answer ends, with an error, where it becomes too long."""
        request.headers["accept-encoding"] = "identity"
        with broken_line():
            response = self._transport.handle_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()
            raise httpx.ReadError("an answer is as long as it says", request=request)
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _BoundedStream(response.stream, self._largest)
        return response

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


class _BoundedStream(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, largest: int) -> None:
        self._stream, self._left = stream, largest

    def __iter__(self) -> Iterator[bytes]:
        with broken_line():
            for piece in self._stream:
                self._left -= len(piece)
                if self._left < 0:
                    raise httpx.ReadError("the server sends more than a client needs")
                yield piece

    def close(self) -> None:
        self._stream.close()


@contextmanager
def broken_line() -> Iterator[None]:
    """Let a connection that ended without a word, or in words of no sense, be tried again by Flower.

    It gives up, for good, on whatever has "SSL" in its message: certificates that are not accepted, but also
    a line that breaks in the middle of a handshake, bytes that were changed on the way, or a proxy that does
    not find the server and says so to a party that expects TLS.
    """
    try:
        yield
    except httpx.TransportError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or any(word in str(cause).upper() for word in ABOUT_CERTIFICATES):
            raise
        raise type(error)("the connection ended, or what came was not from the server") from None
