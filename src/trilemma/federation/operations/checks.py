"""What a party can find out about its own folder and machine: certificates, keys, ports, disk.

Each check yields what is wrong, and the cure; it changes nothing but the disk's check, which writes a small
file and takes it away again.
"""

from __future__ import annotations

import datetime as dt
import errno
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from trilemma.base.errors import UserError
from trilemma.federation.identity import tls_keys
from trilemma.federation.identity.certificates import belongs
from trilemma.federation.party.addresses import address_of
from trilemma.federation.party.layout import METRICS, Party, metrics_port
from trilemma.federation.processes import groups as processes
from trilemma.privacy.secrets import Identity

SOON = dt.timedelta(days=30)
"""How long before its end a certificate is spoken of."""

ROOT_SOON = dt.timedelta(days=365)
"""How long before its end the authority's is: every party has to get the new one from somebody's hand."""

LEAST_DISK = 64 << 20
"""Bytes that must be free, or more where the state is larger: logs, ledgers, the next commits."""

PORT_PATIENCE = 5.0
"""Seconds for which a port may stay taken by a process that is no longer there."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: which check found it, what it is, what cures it, and whether nothing works so.

    >>> Finding("disk", "3 MB are free", "make room").text
    'disk: 3 MB are free. Cure: make room'
    """

    check: str
    what: str
    cure: str
    stops: bool = False

    @property
    def text(self) -> str:
        """One line."""
        return f"{self.check}: {self.what}. Cure: {self.cure}"


# --- certificates and keys --------------------------------------------------------------------------------


def certificates(party: Party, now: dt.datetime | None = None) -> Iterator[Finding]:
    """Check the party's certificate: whose it is, from whom, and from when to when it holds."""
    for path in (party.authority, party.certificate, party.certificate_key):
        if not path.is_file():
            return  # `keys` says that it is missing
    authority = x509.load_pem_x509_certificate(party.authority.read_bytes())
    own = x509.load_pem_x509_certificate(party.certificate.read_bytes())
    anew = "`trilemma federation renew` where the authority is, and copy the new certificate here"
    try:
        own.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        yield Finding(
            "certificate",
            f"{party.certificate.name} is foreign: not issued by the authority in {party.authority.name}",
            f"put both files of this federation back, or {anew}",
            True,
        )
        return
    if not belongs(party.certificate.read_bytes(), party.certificate_key.read_bytes()):
        yield Finding(
            "certificate",
            f"{party.certificate_key.name} is not the key of {party.certificate.name}",
            anew,
            True,
        )
    yield from _named(party, own, anew)
    now = now or dt.datetime.now(dt.UTC)
    yield from _valid(party.certificate.name, own, now, anew)
    root = "`trilemma federation renew --authority` where the authority is, and install the bundles"
    if now > authority.not_valid_after_utc:
        root = "make a new federation"  # nobody believes what it signs, a new certificate for itself included
    yield from _valid(party.authority.name, authority, now, root, ROOT_SOON)


def _named(party: Party, own: x509.Certificate, anew: str) -> Iterator[Finding]:
    """A server's certificate names where clients connect, a client's the client."""
    if party.client is not None:
        names = [str(one.value) for one in own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if names != [party.name]:
            said = f"{party.certificate.name} is that of {', '.join(names) or 'nobody'}, not of {party.name}"
            yield Finding("certificate", said, anew, True)
        return
    found = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]
    host = party.federation.host
    if host not in hosts:
        said = f"{party.certificate.name} is for {', '.join(hosts)}; clients connect to {host}"
        yield Finding("certificate", said, anew, True)


def _valid(
    name: str, certificate: x509.Certificate, now: dt.datetime, anew: str, soon: dt.timedelta = SOON
) -> Iterator[Finding]:
    clock = "if the date is wrong, set this machine's clock"
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    today = f"and here it is {now:%Y-%m-%d %H:%M} UTC"
    if now > end:
        said = f"{name} has expired: it was valid until {end:%Y-%m-%d %H:%M}, {today}"
        yield Finding("certificate", said, f"{anew}; {clock}", True)
    elif now < start:
        said = f"{name} is not valid yet: it is from {start:%Y-%m-%d %H:%M} on, {today}"
        yield Finding("certificate", said, f"set this machine's clock; if that is right, {anew}", True)
    elif now > end - soon:
        yield Finding("certificate", f"{name} expires in {(end - now).days} days, on {end:%Y-%m-%d}", anew)


def keys(party: Party) -> Iterator[Finding]:
    """Check that all secrets are there, are nobody else's business, and are those of the roster."""
    try:
        party.check()
    except UserError as error:
        yield Finding("keys", str(error), "as it says", True)
    if party.client is None or not (party.identity.is_file() and party.certificate_key.is_file()):
        return
    members = party.signed_roster.clients
    again = "bring this client's own secrets/ and the newest roster.json back, or ask the authority to rotate"
    if party.client >= len(members) or members[party.client].removed:
        yield Finding("keys", f"{party.name} is not on the roster", "ask the authority for a newer one", True)
        return
    own = members[party.client]
    if Identity.load(party.identity).public.hex() != own.identity:
        yield Finding("keys", f"identity.key is not that of {party.name} on the roster", again, True)
    if tls_keys.digest_in(party.certificate_key.read_bytes()) != own.tls:
        yield Finding("keys", f"client.key is not that of {party.name} on the roster", again, True)


# --- the machine ------------------------------------------------------------------------------------------


def ports(party: Party) -> Iterator[Finding]:
    """Check that the ports are free of a process that does not run."""
    if any(processes.leads(one) for one in processes.recorded(party.running)):
        return
    federation = party.federation
    if party.client is None:
        yield from _free("server", federation.listen or federation.host, federation.port)
    yield from _metrics(party)


def _metrics(party: Party) -> Iterator[Finding]:
    """Check the port of the metrics that its process would serve; without them everything else works."""
    said = os.environ.get(METRICS)
    try:
        port = metrics_port(party, said)
    except UserError as error:
        yield Finding("ports", str(error), f"set {METRICS}, or `up --metrics`, to a free port", False)
        return
    if port is not None:
        for one in _free("party", "127.0.0.1", port):
            said, cure = f"{one.what}: there will be no metrics", "stop that process, or choose another port"
            yield replace(one, what=said, cure=f"{cure} with `up --metrics` ({METRICS})", stops=False)


def _free(process: str, host: str, port: int) -> Iterator[Finding]:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        _listen(host, port, family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            said = f"port {port} of {host}, the {process}'s, is taken by {_holder(port) or 'another process'}"
            cure = "stop that process; or change `port` in everybody's federation.toml, which moves them all"
        elif error.errno == errno.EACCES:
            said, cure = f"port {port} may not be opened by this user", "choose one above 1023 with `init`"
        else:
            said = (
                f"nobody can listen at {address_of(host, port)} on this machine ({error.strerror or error})"
            )
            cure = "`listen` in this party's federation.toml is an address of this machine, or 0.0.0.0"
        yield Finding("ports", said, cure, True)


def _listen(host: str, port: int, family: socket.AddressFamily) -> None:
    """Listen for a moment; wait for a port that is taken by nobody who can be named.

    A process that was killed keeps its sockets until its last thread has ended, which a busy disk delays, and
    is no longer among those that live.
    """
    until = time.monotonic() + PORT_PATIENCE
    while True:
        try:
            return socket.create_server((host, port), family=family).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until or _holder(port):
                raise
        time.sleep(0.1)


def _holder(port: int) -> str | None:
    """Say who listens at a port, where the system tells."""
    try:
        for one in psutil.net_connections("tcp"):
            if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN and one.pid:
                return f"process {one.pid} ({psutil.Process(one.pid).name()})"
    except psutil.Error:
        pass
    return None


def disk(party: Party) -> Iterator[Finding]:
    """Check that there is room, and that this party may write where it must."""
    stored = (
        [path.stat().st_size for path in party.state.rglob("*") if path.is_file()]
        if party.state.is_dir()
        else []
    )
    needed = max(LEAST_DISK, 8 * max(stored, default=0))
    free = shutil.disk_usage(party.folder).free
    room = f"make room on the disk of {party.folder}, or move the folder, whole, while nothing runs in it"
    if free < needed:
        said = f"the disk is full: {free / 1e6:.0f} MB are free, {needed / 1e6:.0f} MB are needed"
        yield Finding("disk", said, room, True)
    probe = party.folder / ".doctor"
    try:
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = room if full else f"let the user who runs this party write in {party.folder}"
        yield Finding("disk", f"nothing can be written: {error.strerror}", cure, True)
    finally:
        probe.unlink(missing_ok=True)


# --- thoroughly -------------------------------------------------------------------------------------------


def configuration(party: Party) -> Iterator[Finding]:
    """Take configuration, task and this party's own data to pieces, as a run would."""
    from trilemma.federation.party.task import load_task

    try:
        load_task(party)
    except UserError as error:
        cure = "every party needs the same config.toml and roster.json, and its own data where task.py looks"
        yield Finding("configuration", str(error), cure, True)


def memory(party: Party) -> Iterator[Finding]:
    """Check that what must not be forgotten is whole: a client's ledger and budget, the server's commits."""
    from trilemma.federation.client.account import own_statement, read_budget
    from trilemma.federation.server.commits import CommitLog

    if party.client is None:
        for run in sorted((party.state / "runs").glob("*")):
            try:
                CommitLog(run).check()
            except UserError as error:
                yield Finding("memory", str(error), "as it says")
        return
    try:
        statement = own_statement(party)
        if party.budget.is_file() and (budget := read_budget(party)).epsilon <= statement.spent[1]:
            said = f"the budget is spent: ε = {statement.spent[1]:.3g} of {budget.epsilon:.3g}"
            yield Finding(
                "memory", said, "its owner decides: `trilemma federation budget`, or no more rounds"
            )
    except UserError as error:
        yield Finding(
            "memory", str(error), "bring the newest copy of state/ back; never delete a ledger", True
        )


LOCAL = (certificates, keys, ports, disk)
"""Checks of a moment."""

THOROUGH = (configuration, memory)
"""Checks that take the configuration's libraries, and seconds."""
