"""Who comes to a guard's door: the TLS that asks for a certificate, and what a certificate says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from asyncio import sslproto
from typing import Any

from trilemma.flower.limits import Settings
from trilemma.flower.lines import CHUNK


def why_refused(error: Exception) -> str:
    """Say why somebody was not let in, in the words of TLS where it has some."""
    return str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or type(error).__name__)


def server_context(settings: Settings) -> ssl.SSLContext:
    """Return the TLS of the door: the server's certificate, and none but the authority's clients."""
    say_why_refused()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(settings.certificate, settings.key)
    context.load_verify_locations(settings.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def certified_name(writer: asyncio.StreamWriter) -> str:
    """Return the name on the certificate that a peer has shown."""
    certificate = writer.get_extra_info("peercert") or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""


def say_why_refused() -> None:
    """Have asyncio send the alert of a handshake that failed; it closes without a word else.

    A client then cannot tell a certificate that is not taken from a server that is not there.
    """
    ends = sslproto.SSLProtocol._on_handshake_complete
    if getattr(ends, "says_why", False):
        return

    def ends_with_a_word(protocol: Any, error: BaseException | None) -> None:
        if error is not None:
            with contextlib.suppress(OSError, ssl.SSLError):
                protocol._process_outgoing()
        ends(protocol, error)

    setattr(ends_with_a_word, "says_why", True)  # noqa: B010
    setattr(sslproto.SSLProtocol, ends.__name__, ends_with_a_word)


def small_buffers() -> None:
    """Have asyncio read TLS in pieces as long as the guard's; it takes 256 KB for every connection else."""
    sslproto.SSLProtocol.max_size = CHUNK


def listen(settings: Settings) -> socket.socket:
    """Bind to where clients connect."""
    family = socket.AF_INET6 if ":" in settings.listen else socket.AF_INET
    return socket.create_server((settings.listen, settings.port), family=family, backlog=128)
