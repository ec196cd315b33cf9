"""What the authority hands back: a certificate, the roster and what was agreed on, in one public file.

Nothing in a bundle is secret, and nothing is believed because of who carried it: the authority signed the
whole, the certificate and the roster. A client that is let in takes the authority's own certificate from its
first bundle, and compares its fingerprint with what it was told in another way; later ones must be signed by
that same authority.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trilemma import files
from trilemma.errors import UserError
from trilemma.federation import certificates, layout, provisioning
from trilemma.federation.adoption import adopt
from trilemma.federation.authority import Authority
from trilemma.federation.layout import Federation, Party
from trilemma.federation.requests import Keys, next_keys
from trilemma.federation.rosters import SignedRoster, check_follows, complaint

LARGEST = 4 << 20
"""Bytes of a bundle that is read."""
Pem = Annotated[str, Field(max_length=8192)]


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    version: Literal[1] = 1
    client: Annotated[int, Field(ge=0)] | None
    authority: Pem
    certificate: Pem
    roster: str
    facts: str
    config: str

    @property
    def message(self) -> bytes:
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return b"trilemma bundle v1\n" + text.encode()


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    bundle: _Content
    signature: Annotated[str, Field(pattern="^([0-9a-f]{2}){8,80}$")]


@dataclass(frozen=True)
class Bundle:
    """What a party is handed; `client` is None for the server."""

    client: int | None
    authority: bytes
    certificate: bytes
    roster: SignedRoster
    facts: str
    config: str

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
            if path.stat().st_size > LARGEST:
                raise UserError(f"it has more than {LARGEST} bytes")
            found = _File.model_validate_json(path.read_text("utf-8"))
            content, refusal = found.bundle, UserError("it is not signed by the authority it names")
            authority = content.authority.encode()
            certificates.check_signed(authority, content.message, bytes.fromhex(found.signature), refusal)
            roster = SignedRoster.read(content.roster, authority)
            certificates.check_issued(content.certificate.encode(), authority)
            bundle = cls(
                content.client,
                authority,
                content.certificate.encode(),
                roster,
                content.facts,
                content.config,
            )
            if bundle.client is not None and certificates.name_on(bundle.certificate) != bundle.party:
                raise UserError(f"its certificate is not {bundle.party}'s")
            return bundle
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        except ValidationError as error:
            raise UserError(f"{path} is no bundle: {complaint(error)}") from None
        except UserError as error:
            raise UserError(f"{path} is no bundle: {error}") from None


def write_bundle(authority: Authority, client: int | None, folder: Path) -> Path:
    """Write what a party is handed now; return the file."""
    party = "server" if client is None else f"client-{client}"
    certificate = authority.given(party)
    if certificate is None:
        raise UserError(f"the authority has no certificate of {party} to hand out")
    content = _Content(
        client=client,
        authority=authority.certificate.decode(),
        certificate=certificate.decode(),
        roster=authority.roster.text,
        facts=authority.facts,
        config=authority.config,
    )
    whole = {
        "bundle": content.model_dump(mode="json"),
        "signature": authority.issued.sign(content.message).hex(),
    }
    path = folder / f"{party}.json"
    files.write_atomically(path, (json.dumps(whole, indent=1) + "\n").encode())
    return path


def install(folder: Path, bundle: Bundle) -> Party:
    """Put what the authority handed back where it belongs: into a party's folder, or a request's."""
    if (folder / layout.PUBLIC).is_file():
        return _renew(Party.open(folder), bundle)
    keys = Keys(folder / "secrets")
    if not keys.identity.is_file():
        raise UserError(f"{folder} is no party's folder, and no request was made in it")
    _check_own(keys, bundle)
    provisioning.begin_folder(folder, Federation.parse(bundle.facts), bundle.config)
    party = Party(folder.resolve(), bundle.client)
    _write_certificate(party, bundle)
    provisioning.complete_folder(party, bundle.authority, bundle.roster)
    return party


def _renew(party: Party, bundle: Bundle) -> Party:
    """Take a newer certificate and roster; and, where they wait for this, the keys that were asked for."""
    if bundle.authority != party.authority.read_bytes():
        raise UserError("the bundle is of another authority than this folder's")
    if bundle.client != party.client:
        raise UserError(f"the bundle is {bundle.party}'s, and this is {party.name}'s folder")
    with files.locked(party.lock):
        check_follows(bundle.roster, party.signed_roster)
        waiting = next_keys(party)
        if party.client is None:
            if not certificates.belongs(bundle.certificate, party.certificate_key.read_bytes()):
                raise UserError("the bundle's certificate is not about this server's key")
        elif waiting.identity.is_file() and waiting.public == bundle.identity:
            _check_own(waiting, bundle)
            waiting.into(party.identity.parent)
        else:
            _check_own(Keys(party.identity.parent), bundle)
        _write_certificate(party, bundle)
        adopt(party, bundle.roster.text)
    return party


def _check_own(keys: Keys, bundle: Bundle) -> None:
    """Refuse a bundle that is about somebody else's keys, or about one who was removed."""
    if keys.public != bundle.identity:
        raise UserError(f"the bundle's roster has another identity for {bundle.party} than this folder")
    if not certificates.belongs(bundle.certificate, keys.tls.read_bytes()):
        raise UserError("the bundle's certificate is not about this client's key")


def _write_certificate(party: Party, bundle: Bundle) -> None:
    party.certificate.parent.mkdir(exist_ok=True)
    files.write_atomically(party.certificate, bundle.certificate)
