"""How a federation's folders are made: keys, certificates, the first roster, and whom a client counts on.

`init` makes all of them at once, for a pilot or by somebody all parties trust; `bootstrap`, `bundles` and
`membership` make one at a time from the same pieces. What lies where is `layout`'s to say.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.plugins import Plugin
from trilemma.federation.identity import authority as authorities
from trilemma.federation.identity import certificates
from trilemma.federation.identity.authority import Authority
from trilemma.federation.identity.rosters import Member, SignedRoster
from trilemma.federation.party.layout import CONFIG, TASK, UNFINISHED, Party, parties
from trilemma.federation.party.permission import Permission
from trilemma.federation.party.public_facts import PUBLIC, Federation
from trilemma.privacy.secrets import Identity
from trilemma.task.file import copy_task


def check_free(folder: Path) -> None:
    """Refuse a folder that holds anything."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; keys are never overwritten, choose a new folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a federation; refuse to touch one that holds anything.

    Whatever goes wrong meanwhile, a full disk or Ctrl-C among it, half a federation's keys are no use to
    anybody: the corrected command finds the place free. A folder that was there stays, empty again.
    """
    there = folder.exists()
    check_free(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}") from None
    try:
        yield
    except BaseException:
        for path in folder.resolve().iterdir() if there else (folder,):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def init(
    folder: Path,
    federation: Federation,
    config: str,
    hosts: tuple[str, ...] = ("localhost",),
    task: Path | None = None,
    plugins: Iterable[Plugin] = (),
) -> list[Party]:
    """Make everything a federation needs; refuse to touch one that is there.

    Plugins are copied to every party; `config` holds their digests, so that the terms do.
    """
    if task is not None and not task.is_file():
        raise UserError(f"there is no {task}")
    federation = declared(federation, task)
    with new_folder(folder):
        names = ["server", *(f"client-{i}" for i in range(federation.clients))]
        for name in names:
            begin_folder(folder / name, federation, config, task, plugins)
        found = parties(folder)
        server, clients = found[0], found[1:]

        authority = Authority.found(folder / authorities.FOLDER, federation.name, federation.toml(), config)
        write_certificate(server, authority.issued, (federation.host, *hosts))
        members: list[Member] = []
        for client in clients:
            install_certificate(client, certificates.issue_client(authority.issued, client.name))
            members.append(new_member(client))
        roster = authority.enact(authority.sign(federation.name, tuple(members)))
        for party in found:
            complete_folder(party, authority.certificate, roster)
            authority.keep(party.name, party.certificate.read_bytes())
        if federation.on_one_machine:  # whoever made it owns all of it, and means what it was made for
            for client in clients:
                Permission().with_plan(client.agreed.plan).save(client.allowed)
        return found


def declared(federation: Federation, task: Path | None) -> Federation:
    """Return the public facts with what a record may be, as the task says it."""
    from trilemma.task import Task  # and torch, which starting and stopping do without

    expects = None if task is None else Task.from_file(task).expects
    return federation if expects is None else replace(federation, records=expects.plain())


def begin_folder(
    home: Path, federation: Federation, config: str, task: Path | None = None, plugins: Iterable[Plugin] = ()
) -> None:
    """Make a party's folder, with what is the same in all of them."""
    home.mkdir(mode=0o700, exist_ok=True)  # a client's notes, its losses for one, are nobody else's business
    (home / PUBLIC).write_text(federation.toml())
    (home / CONFIG).write_text(config)
    if task is not None:
        copy_task(task.resolve(), home, TASK)
    for plugin in plugins:
        plugin.copy_into(home)


def new_member(client: Party) -> Member:
    """Make a client's identity in its folder, which has a certificate; return what a roster says about it."""
    identity = Identity.generate()
    identity.save(client.identity)
    tls = certificates.key_digest(client.certificate.read_bytes())
    return Member(name=client.name, identity=identity.public.hex(), tls=tls)


def complete_folder(party: Party, authority: bytes, roster: SignedRoster) -> None:
    """Add what a party's folder needs beside its own keys: the authority's certificate and the roster.

    A client counts on those who are on the first roster it gets.
    """
    first = not party.roster.is_file() or (party.folder / UNFINISHED).is_file()
    party.authority.parent.mkdir(exist_ok=True)
    party.authority.write_bytes(authority)
    if party.client is not None and first:
        write_known(party, {member.identity for member in roster.clients})
    roster.save(party.roster)


def write_known(party: Party, identities: Iterable[str]) -> None:
    """Write down the identities that a client counts on."""
    files.write_atomically(party.known, (json.dumps(sorted(identities), indent=1) + "\n").encode())


def write_certificate(server: Party, authority: certificates.Issued, hosts: tuple[str, ...]) -> None:
    """Issue and install the server's certificate."""
    issued = certificates.issue_server(authority, tuple(dict.fromkeys(hosts)))
    install_certificate(server, issued)


def install_certificate(party: Party, issued: certificates.Issued) -> None:
    """Put a certificate and its key where a party looks for them."""
    files.write_atomically(party.certificate_key, issued.key, secret=True)
    party.certificate.parent.mkdir(exist_ok=True)
    party.certificate.write_bytes(issued.certificate)
