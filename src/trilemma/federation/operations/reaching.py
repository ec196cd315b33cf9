"""A client at the server's door, once: is it there, does it let this client in, what does it have?

The server tells whoever it would let in what configuration, roster and versions it has. So a client can name
what is wrong in the time of one handshake, beside the line that it may have already.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator

from trilemma.base.errors import UserError
from trilemma.federation.operations.checks import Finding
from trilemma.federation.party.facts import Facts
from trilemma.federation.party.layout import Party

PATIENCE = 3.0
"""Seconds for a connection, and for the answer."""


def findings(client: Party) -> list[Finding]:
    """Return what is wrong between a client and the server, as this client can see it."""
    return list(_findings(client))


def _findings(client: Party) -> Iterator[Finding]:
    """Knock at the server's door; tell what keeps a client out, or what differs between the two."""
    from trilemma.federation.carriers.grpc.client import TurnedAwayError, look
    from trilemma.federation.carriers.grpc.credentials import Tls

    address = client.federation.address
    tls = Tls(client.certificate, client.certificate_key, client.authority)
    try:
        told = Facts.read(json.loads(look(address, tls, PATIENCE)))
    except TurnedAwayError as error:
        yield Finding("connection", f"the server at {address} says: {error}", _cure(str(error)), True)
    except OSError:
        yield from _handshake(client, address)
    except (UserError, ValueError, RecursionError) as error:
        yield Finding(
            "connection", f"{address}: {error}", "use the same version of trilemma everywhere", True
        )
    else:
        yield from compared(Facts.of(client), told, "the server")


def _cure(said: str) -> str:
    if "version" in said:
        return "install the same version of trilemma everywhere"
    if "roster" in said:
        return "compare roster.json with the server's; the authority has the newest"
    return "as it says; the server's operator sees the same with `trilemma federation status`"


def _handshake(client: Party, address: str) -> Iterator[Finding]:
    """Name what TLS did not like, the server's certificate or this client's; or that nobody is there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    host, port = client.federation.host, client.federation.port
    try:
        context.load_verify_locations(client.authority)
        context.load_cert_chain(client.certificate, client.certificate_key)
        with (
            socket.create_connection((host, port), timeout=PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=host) as line,
        ):
            why = "it says nothing"
            if not line.recv(1):  # it has shown itself, has then seen our certificate, and hung up
                said = f"the server at {address} does not take this client's certificate"
                cure = "have it renewed; if it is valid by this machine's date, the server's clock is wrong"
                yield Finding("certificate", said, cure, True)
                return
    except ssl.SSLCertVerificationError as error:
        said = f"the server at {address} shows a certificate that is not accepted: {error.verify_message}"
        foreign = "unable to get" in error.verify_message or "self-signed" in error.verify_message
        cure = (
            "this folder and that server are of two federations: see `host` and tls/ca.crt"
            if foreign
            else "the server's operator renews it; if the date here is wrong, set this machine's clock"
        )
        yield Finding("certificate", said, cure, True)
        return
    except OSError as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    yield Finding(
        "connection",
        f"the server does not answer at {address} ({why})",
        "see that it is up (`trilemma federation doctor` there), that `host` in federation.toml is its "
        "name, and that no firewall is between",
    )


def compared(own: Facts, theirs: Facts, who: str) -> Iterator[Finding]:
    """Tell what two parties do not have in common."""
    files = {"config": "config.toml", "roster": "roster.json", "examples": "`examples` in federation.toml"}
    for name, (ours, other) in own.differences(theirs).items():
        if name in files:
            said = f"{files[name]} differs from that of {who}: {ours} here, {other} there"
            yield Finding("agreement", said, "the same bytes everywhere; a newer roster is the authority's")
        else:
            said = f"{name} {ours} here, {other} at {who}"
            yield Finding("versions", said, "install the same version everywhere")
