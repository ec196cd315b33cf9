"""Certificates end after a year: how they are renewed (`up` and `doctor` say when it is time).

A certificate says a name and a key. The authority remembers what it gave out, so it can certify the same once
more without being asked, or a fresh key where a party's folder lies beside its own. Nothing else changes: the
roster, which says who is who, does not know about certificates, and an expired one keeps its owner out until
there is a new one.

The authority's own certificate, everybody's only root, ends after ten years. It is renewed for the key it has
and in its own name, so that whatever either of the two vouches for, so does the other: parties may have the
old one or the new one until the old one ends, and take the new one from a bundle, which that key signed. (An
authority whose key is lost or stolen is another matter: who has the key has the federation, and a new one is
founded.)
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

from trilemma import files
from trilemma.errors import UserError
from trilemma.federation import adoption, bundles, certificates, tls_keys
from trilemma.federation.authority import Authority
from trilemma.federation.membership import BUNDLES, parties_beside


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
    found: list[Renewed] = []
    for client in (None, *authority.roster.keys.members):
        name = "server" if client is None else f"client-{client}"
        here = beside.get(name)
        before = authority.given(name) if here is None else here.certificate.read_bytes()
        if before is None:
            raise UserError(f"the authority does not know {name}'s certificate, and its folder is not here")
        request = None
        if here is not None and fresh:
            key, request = tls_keys.new_request(name)
        after = certificates.renewed(authority.issued, before, request)
        if here is not None:
            with files.locked(here.lock):
                bundles.finish(here)
                files.write_atomically(here.authority, authority.certificate)
                adoption.adopt(here, authority.roster.text)
                if request is not None:
                    files.write_atomically(here.certificate_key, key, secret=True)
                files.write_atomically(here.certificate, after)
        authority.keep(name, after)
        path = None
        if here is None:
            path = bundles.write_bundle(authority, client, authority.folder / BUNDLES)
        found.append(Renewed(name, certificates.valid_until(after), here is not None, path))
    return found
