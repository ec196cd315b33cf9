"""Who each side is, by mutual TLS with the federation's authority, and gRPC's settings for both.

Everything a stranger can do ends before Python sees it: who shows no certificate of the authority gets no
further than the handshake, which has a limit, as has the number of connections.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509

from trilemma.base.errors import UserError
from trilemma.federation.carriers.grpc import frames
from trilemma.federation.identity.tls_keys import digest_of

SERVICE, CALL = "trilemma.Federation", "Carry"
"""The one method there is."""
VERSION = "trilemma-version"
"""Name under which both ends say their version before anything else."""
FACTS, LOOK = "trilemma-facts", "trilemma-look"
"""What each end has, in words that the carrier does not read; and that a client only wants to hear those."""

_MESSAGE = frames.PIECE_BYTES + frames.ROOM
_WINDOW = 1 << 21
"""Bytes that a peer may send before they are asked for."""


@dataclass(frozen=True)
class Tls:
    """Where a party's certificate, its private key and the authority's certificate are.

    They are read anew for every connection: a renewed certificate needs no new process.
    """

    certificate: Path
    key: Path
    authority: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return key, certificate and authority, as PEM."""
        try:
            return self.key.read_bytes(), self.certificate.read_bytes(), self.authority.read_bytes()
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Limits:
    """How hard a server's door is.

    At most `connections` at a time, of which each has `handshake` seconds to show who it is; a peer that is
    silent for `silence` seconds is gone. An answer has at most `longest` bytes. An identity may come
    `arrivals` times at once, and once more every second.
    """

    connections: int = 256
    handshake: float = 5.0
    silence: float = 8.0
    longest: int = 1 << 34
    arrivals: int = 20


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a connection, by its certificate."""

    key: str
    """SHA-256 of its public key (SubjectPublicKeyInfo)."""
    until: dt.datetime


def peer_of(context: grpc.ServicerContext) -> Peer | None:
    """Return who asks, as TLS has proven it."""
    shown = context.auth_context().get("x509_pem_cert")
    if not shown:
        return None
    certificate = x509.load_pem_x509_certificate(shown[0])
    return Peer(digest_of(certificate.public_key()), certificate.not_valid_after_utc)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return a server's credentials; a certificate that was renewed is shown from the next handshake on."""
    now = tls.read()

    def configuration(pems: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
        key, certificate, authority = pems
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal now
        try:
            found = tls.read()
        except UserError:
            return None
        if found == now:
            return None
        now = found
        return configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        configuration(now), renewed, require_client_authentication=True
    )


def client_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return a client's credentials: it believes the federation's authority and nobody else."""
    key, certificate, authority = tls.read()
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _both(silence: float) -> list[tuple[str, int]]:
    """Return what holds for both ends: one message is one piece, and whoever is silent is gone."""
    return [
        ("grpc.max_receive_message_length", _MESSAGE),
        ("grpc.max_send_message_length", _MESSAGE),
        ("grpc.max_metadata_size", 4096),
        ("grpc.absolute_max_metadata_size", 8192),
        ("grpc.http2.lookahead_bytes", _WINDOW),
        ("grpc.keepalive_time_ms", int(500 * silence)),
        ("grpc.keepalive_timeout_ms", int(500 * silence)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(limits: Limits) -> list[tuple[str, int]]:
    """Return gRPC's settings for a server."""
    return [
        *_both(limits.silence),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.server_handshake_timeout_ms", int(1000 * limits.handshake)),
        ("grpc.max_concurrent_streams", 2),
        ("grpc.max_connection_idle_ms", int(1000 * limits.handshake)),
        ("grpc.http2.min_ping_interval_without_data_ms", int(200 * limits.silence)),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.http2.bdp_probe", 0),
    ]


def client_options(address: str, silence: float) -> list[tuple[str, int]]:
    """Return gRPC's settings for a client. On its own machine it asks no proxy."""
    return [
        *_both(silence),
        ("grpc.enable_http_proxy", int(not on_this_machine(address))),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def on_this_machine(address: str) -> bool:
    """Tell whether an address is loopback's.

    >>> [on_this_machine(one) for one in ("127.0.0.1:9190", "[::1]:9190", "fl.example.org:9190")]
    [True, True, False]
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
