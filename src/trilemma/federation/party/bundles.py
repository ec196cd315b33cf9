"""What the authority hands back: a certificate, the roster and what was agreed on, in one public file.

Nothing in a bundle is secret, and nothing is believed because of who carried it: the authority signed the
whole, the certificate and the roster. A client that is let in takes the authority's own certificate from its
first bundle, and compares its fingerprint with what it was told in another way; later ones must be signed by
that same authority. Bundles are numbered, and a party takes none from before the last it took: an old
certificate, or an old key's, does not come back.

A bundle changes several files. It is written down whole before the first of them changes and forgotten after
the last, so that whoever starts after a crash finishes what was begun (`finish`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.identity import certificates, signed_files
from trilemma.federation.identity.authority import Authority
from trilemma.federation.identity.rosters import SignedRoster, check_follows
from trilemma.federation.identity.signed_files import Content, Ecdsa, Strict
from trilemma.federation.party import layout, provisioning
from trilemma.federation.party.adoption import adopt
from trilemma.federation.party.layout import Party
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.requests import RequestKeys, next_keys

LARGEST = 4 << 20
"""Bytes of a bundle that is read."""
Pem = Annotated[str, Field(max_length=8192)]


class _Content(Content):
    heading = b"trilemma bundle v2"
    version: Literal[2] = 2
    number: Annotated[int, Field(ge=1, lt=1 << 53)]
    client: Annotated[int, Field(ge=0)] | None
    authority: Pem
    certificate: Pem
    roster: str
    facts: str
    config: str


class _File(Strict):
    bundle: _Content
    signature: Ecdsa


@dataclass(frozen=True)
class Bundle:
    """What a party is handed; `client` is None for the server.

    `digest` is that of what it says, `text` is the file.
    """

    number: int
    client: int | None
    authority: bytes
    certificate: bytes
    roster: SignedRoster
    facts: str
    config: str
    digest: str
    text: str = field(repr=False, compare=False)

    @property
    def party(self) -> str:
        """Whose it is."""
        return "server" if self.client is None else f"client-{self.client}"

    @property
    def identity(self) -> str:
        """The identity that its roster has for the client it is for."""
        place = -1 if self.client is None else self.client
        if place not in self.roster.keys.members:
            raise UserError(f"{self.party} is not on the roster, or was removed from it")
        return self.roster.clients[place].identity

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read a bundle that whoever carried it may have changed; its own authority must have signed it."""
        try:
            return cls.read(signed_files.text_in(path, LARGEST))
        except UserError as error:
            raise UserError(f"{path} is no bundle: {error}") from None

    @classmethod
    def read(cls, text: str) -> Bundle:
        """Read a bundle; refuse one that its own authority has not signed."""
        found = signed_files.read(text, _File)
        content, refusal = found.bundle, UserError("it is not signed by the authority it names")
        authority, certificate = content.authority.encode(), content.certificate.encode()
        certificates.check_signed(authority, content.message, bytes.fromhex(found.signature), refusal)
        roster = SignedRoster.read(content.roster, authority)
        certificates.check_issued(certificate, authority)
        bundle = cls(
            *(content.number, content.client, authority, certificate, roster),
            *(content.facts, content.config, content.digest, text),
        )
        if bundle.client is not None and certificates.name_on(certificate) != bundle.party:
            raise UserError(f"its certificate is not {bundle.party}'s")
        return bundle


def write_bundle(authority: Authority, client: int | None, folder: Path) -> Path:
    """Write what a party is handed now; return the file."""
    party = "server" if client is None else f"client-{client}"
    certificate = authority.given(party)
    if certificate is None:
        raise UserError(f"the authority has no certificate of {party} to hand out")
    content = _Content(
        number=authority.next_number(),
        client=client,
        authority=authority.certificate.decode(),
        certificate=certificate.decode(),
        roster=authority.roster.text,
        facts=authority.facts,
        config=authority.config,
    )
    whole = _File(bundle=content, signature=authority.issued.sign(content.message).hex())
    path = folder / f"{party}.json"
    files.write_atomically(path, signed_files.text_of(whole).encode())
    return path


def begin(folder: Path, bundle: Bundle) -> Party:
    """Make a party's folder of one in which a request was made: `UNFINISHED`, until its owner's part is in.

    What a crash left of an earlier try is written over.
    """
    keys = RequestKeys(folder / "secrets")
    if not keys.identity.is_file():
        raise UserError(f"{folder} is no party's folder, and no request was made in it")
    _check_own(keys, bundle)
    files.write_atomically(folder / layout.UNFINISHED, b"")
    provisioning.begin_folder(folder, Federation.parse(bundle.facts), bundle.config)
    party = Party(folder.resolve(), bundle.client)
    _write_certificate(party, bundle)
    provisioning.complete_folder(party, bundle.authority, bundle.roster)
    _remember(party, bundle)
    return party


def install(folder: Path, bundle: Bundle) -> Party:
    """Take a newer certificate and roster; and, where they wait for this, the keys that were asked for."""
    party = Party.open(folder)
    with files.locked(party.lock):
        finish(party)
        _check_addressed(party, bundle)
        check_follows(bundle.roster, party.signed_roster)
        _check_newer(party, bundle)
        if party.client is not None:
            waiting = next_keys(party)
            asked_for = waiting.identity.is_file() and waiting.public == bundle.identity
            _check_own(waiting if asked_for else RequestKeys(party.identity.parent), bundle)
        elif not certificates.belongs(bundle.certificate, party.certificate_key.read_bytes()):
            raise UserError("the bundle's certificate is not about this server's key")
        files.write_atomically(party.installing, bundle.text.encode())
        _apply(party, bundle)
    return party


def finish(party: Party) -> bool:
    """Finish installing a bundle where a crash came in between; tell whether there was one.

    For who holds the folder's lock.
    """
    bundle = unfinished(party)
    if bundle is None:
        return False
    _apply(party, bundle)
    return True


def unfinished(party: Party) -> Bundle | None:
    """Return the bundle that was being installed when a crash came; what is wrong with it names the cure."""
    if not party.installing.is_file():
        return None
    try:
        bundle = Bundle.load(party.installing)
        _check_addressed(party, bundle)
    except UserError as error:
        name = party.installing.name
        raise UserError(f"{error}; delete {name}, and install the newest bundle once more") from None
    return bundle


def _apply(party: Party, bundle: Bundle) -> None:
    """Do what a bundle says; whatever of it was done before is as it was."""
    if party.authority.read_bytes() != bundle.authority:
        files.write_atomically(party.authority, bundle.authority)
    adopt(party, bundle.roster.text)
    if party.client is not None:
        waiting = next_keys(party)
        if not waiting.identity.is_file() or waiting.public == bundle.identity:
            waiting.into(party.identity.parent)
    _write_certificate(party, bundle)
    _remember(party, bundle)
    party.installing.unlink()


def _check_addressed(party: Party, bundle: Bundle) -> None:
    """Refuse a bundle of another authority, or for another party."""
    if not certificates.same_authority(bundle.authority, party.authority.read_bytes()):
        raise UserError("the bundle is of another authority than this folder's")
    if bundle.client != party.client:
        raise UserError(f"the bundle is {bundle.party}'s, and this is {party.name}'s folder")


def _check_newer(party: Party, bundle: Bundle) -> None:
    """Refuse a bundle from before the last one, or another one of its number."""
    if not party.installed.is_file():
        return
    with files.readable(party.installed, "the last bundle's number"):
        last = json.loads(party.installed.read_text("utf-8"))
        number, digest = int(last["number"]), last["digest"]
    if bundle.number < number:
        raise UserError(f"the bundle is number {bundle.number}: number {number} was installed here since")
    if bundle.number == number and bundle.digest != digest:
        raise UserError(f"there are two bundles with the number {bundle.number}; ask the authority")


def _remember(party: Party, bundle: Bundle) -> None:
    last = {"number": bundle.number, "digest": bundle.digest}
    files.write_atomically(party.installed, json.dumps(last).encode())


def _check_own(keys: RequestKeys, bundle: Bundle) -> None:
    """Refuse a bundle that is about somebody else's keys, or about one who was removed."""
    if keys.public != bundle.identity:
        raise UserError(f"the bundle's roster has another identity for {bundle.party} than this folder")
    if not certificates.belongs(bundle.certificate, keys.tls.read_bytes()):
        raise UserError("the bundle's certificate is not about this client's key")


def _write_certificate(party: Party, bundle: Bundle) -> None:
    party.certificate.parent.mkdir(exist_ok=True)
    files.write_atomically(party.certificate, bundle.certificate)
