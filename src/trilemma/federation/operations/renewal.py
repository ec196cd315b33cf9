"""Certificates end after a year: how they are renewed (`up` and `doctor` say when it is time).

A certificate says a name and a key. The authority remembers what it gave out, so it can certify the same once
more without being asked, and nothing else changes: the roster has the digests of keys. An expired certificate
keeps its owner out until there is a new one. Where a party's folder lies beside its own, the authority can
certify a fresh key too; a client's is put on a new roster.

The authority's own certificate, everybody's only root, ends after ten years. It is renewed for the key it has
and in its own name, so that whatever either of the two vouches for, so does the other: parties may have the
old one or the new one until the old one ends, and take the new one from a bundle, which that key signed. (An
authority whose key is lost or stolen is another matter: who has the key has the federation, and a new one is
founded.)
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.identity import certificates, tls_keys
from trilemma.federation.identity.authority import Authority
from trilemma.federation.operations.membership import BUNDLES, parties_beside
from trilemma.federation.party import adoption, bundles
from trilemma.federation.party.layout import Party


@dataclass(frozen=True)
class Renewed:
    """A party's new certificate: installed in its folder, or in a bundle it is to be handed."""

    party: str
    until: dt.datetime
    here: bool
    bundle: Path | None = None


def renew(folder: Path, fresh: bool = False, own: bool = False) -> list[Renewed]:
    """Renew the certificates of the server and of all clients on the roster; return what was done.

    Keys stay; `fresh` ones are made for the parties whose folders are here. (A client elsewhere that wants
    other keys asks for them: `rotate`.) With `own` the authority's certificate is renewed first. Parties here
    get the newest roster too, which a command that was broken off may have kept from them.
    """
    authority = Authority.open(folder)
    if own:
        authority.renew()
    beside = {party.name: party for party in parties_beside(authority)}
    names = {"server": None, **{f"client-{client}": client for client in authority.roster.keys.members}}
    made: dict[str, _Made] = {}
    for name in names:
        here = beside.get(name)
        before = authority.given(name) if here is None else here.certificate.read_bytes()
        if before is None:
            raise UserError(f"the authority does not know {name}'s certificate, and its folder is not here")
        key, request = tls_keys.new_request(name) if fresh and here is not None else (None, None)
        made[name] = _Made(certificates.renewed(authority.issued, before, request), key)
    _enact(authority, {client: made[name] for name, client in names.items() if client is not None})
    found: list[Renewed] = []
    for name, client in names.items():
        here, path, certificate = beside.get(name), None, made[name].certificate
        if here is not None:
            _put(authority, here, made[name])
        authority.keep(name, certificate)
        if here is None:
            path = bundles.write_bundle(authority, client, authority.folder / BUNDLES)
        found.append(Renewed(name, certificates.valid_until(certificate), here is not None, path))
    return found


@dataclass(frozen=True)
class _Made:
    """A certificate, and its private key where that is new."""

    certificate: bytes
    key: bytes | None = field(repr=False)


def _enact(authority: Authority, made: Mapping[int, _Made]) -> None:
    """Put fresh keys on the roster: who comes with another one than the roster has is not let in."""
    clients = list(authority.roster.clients)
    for client, one in made.items():
        digest = certificates.key_digest(one.certificate)
        clients[client] = clients[client].model_copy(update={"tls": digest})
    if tuple(clients) != authority.roster.clients:
        authority.enact(authority.sign(authority.roster.federation, tuple(clients)))


def _put(authority: Authority, here: Party, made: _Made) -> None:
    with files.locked(here.lock):
        bundles.finish(here)
        files.write_atomically(here.authority, authority.certificate)
        adoption.adopt(here, authority.roster.text)
        if made.key is not None:
            files.write_atomically(here.certificate_key, made.key, secret=True)
        files.write_atomically(here.certificate, made.certificate)
