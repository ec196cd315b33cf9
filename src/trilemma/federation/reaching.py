"""A client at the server's door, once: is it there, is it the right one, what time is it, what does it have?

The guard answers one question itself (`facts`): each side says what configuration, roster and versions it
has, and the server says its time. So a client can name what is wrong in the time of one handshake.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

from trilemma.errors import UserError
from trilemma.federation.checks import Finding
from trilemma.federation.facts import FACTS, Facts
from trilemma.federation.layout import Party
from trilemma.federation.peers import clock_agrees

PATIENCE = 3.0
"""Seconds for a connection, and for the answer."""

LARGEST = 1 << 16
"""Bytes of an answer that are read."""

NO_CHECK_TIME = 0x200000
"""OpenSSL's flag for taking a certificate whatever the clock says; Python has no name for it."""

TRIES = 3
"""How often a server is asked what it has against a client, where its answer is cut off."""


class NobodyThereError(OSError):
    """Something takes connections, and closes them before any certificate was shown."""


@dataclass(frozen=True)
class Answer:
    """What the server said: how many seconds this machine's clock is ahead of its, and what it has."""

    ahead: float
    facts: Facts


def ask(client: Party, any_time: bool = False) -> Answer:
    """Exchange facts with the server; `any_time`: certificates that have run out are taken too.

    Raises:
        OSError: nobody is there, or TLS failed on either side.
        UserError: what answers is no guard of this package.
    """
    context = _context(client)
    if any_time:
        context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | NO_CHECK_TIME)
    body = json.dumps(Facts.of(client).plain())
    with contextlib.closing(_connection(client, context)) as connection:
        try:
            connection.connect()
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            # The server has not said who it is, so it cannot mean us: a proxy, say, that did not reach it.
            raise NobodyThereError("the connection was closed before the server showed itself") from None
        asked = time.time()
        connection.request("POST", FACTS, body, {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read(LARGEST)
        # The server looked at its clock some time between the question and the answer.
        middle = (asked + time.time()) / 2
    try:
        if response.status != 200:
            raise UserError(f"status {response.status}")
        told = json.loads(content)
        return Answer(middle - float(told["time"]), Facts.read(told["facts"]))
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        raise UserError(f"what answers is no guard of this version ({error})") from None


def _context(client: Party) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(client.authority)
    context.load_cert_chain(client.certificate, client.certificate_key)
    return context


def _connection(client: Party, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    federation = client.federation
    return http.client.HTTPSConnection(federation.host, federation.port, timeout=PATIENCE, context=context)


def _alert(client: Party) -> ssl.SSLError | None:
    """Return what the server's TLS says against this client, where it says something.

    In TLS 1.3 a client is done before the server has looked at its certificate, and may then find a closed
    connection where an alert was meant; in TLS 1.2 it waits for the server's word. That word too is lost
    where the connection is reset behind it before it is read, so there is more than one try.
    """
    for _ in range(TRIES):
        context = _context(client)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        try:
            with contextlib.closing(_connection(client, context)) as connection:
                connection.connect()
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return None  # closed without a word, as by a proxy that reaches nobody
        except ssl.SSLError as error:
            return error
        except ConnectionResetError:
            continue
        except OSError:
            return None
        return None
    return None


def findings(client: Party) -> list[Finding]:
    """Return what is wrong between a client and the server, as this client can see it."""
    return list(_findings(client))


def _findings(client: Party) -> Iterator[Finding]:
    """Knock at the server's door; tell what keeps a client out, or what differs between the two."""
    address = client.federation.address
    try:
        answer = ask(client)
    except ssl.SSLError as error:
        yield from _handshake(client, address, error)
        return
    except (OSError, http.client.HTTPException) as error:
        alert = _alert(client) if isinstance(error, ConnectionError) else None
        if alert is not None:
            yield from _handshake(client, address, alert)
            return
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        yield Finding(
            "connection",
            f"the server does not answer at {address} ({why})",
            "see that it is up (`trilemma federation doctor` there), that `host` in federation.toml is its "
            "name, and that no firewall is between",
        )
        return
    except UserError as error:
        yield Finding("connection", f"{address}: {error}", "use the same version of trilemma everywhere")
        return
    yield from _clock(answer.ahead)
    yield from compared(Facts.of(client), answer.facts, "the server")


def _clock(ahead: float) -> Iterator[Finding]:
    if clock_agrees(ahead):
        return
    how = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
    said = f"this machine's clock is {how} the server's, which refuses such requests"
    yield Finding("clock", said, "set the clock that is wrong (NTP)", True)


def _handshake(client: Party, address: str, error: ssl.SSLError) -> Iterator[Finding]:
    """Name what TLS did not like: the server's certificate, this client's, or the clock."""
    if isinstance(error, ssl.SSLCertVerificationError):
        with contextlib.suppress(OSError, UserError, http.client.HTTPException):
            clock = list(_clock(ask(client, any_time=True).ahead))
            if clock:  # a certificate that seems to have run out, and a clock that is wrong
                yield from clock
                return
        said = f"the server at {address} shows a certificate that is not accepted: {error.verify_message}"
        foreign = "unable to get" in error.verify_message or "self-signed" in error.verify_message
        cure = (
            "this folder and that server are of two federations: see `host` and tls/ca.crt"
            if foreign
            else "the server's operator renews it; if the date here is wrong, set this machine's clock"
        )
        yield Finding("certificate", said, cure, True)
        return
    reason = (error.reason or "").lower().replace("_", " ")
    yield Finding(
        "certificate",
        f"the server at {address} does not take this client's certificate ({reason or type(error).__name__})",
        "have it renewed; if it is valid by this machine's date, the server's clock or authority is another",
        True,
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
