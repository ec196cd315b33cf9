"""A client asks to be let in: it makes its keys on its own machine, and sends their public halves alone.

    {"request": {version, name, identity, certificate, former}, "identity": …, "tls": …}

Two keys are asked for: the identity (Ed25519) and the TLS key (P-256, as a signing request, PKCS#10). Each is
shown to be the sender's own, since both sign the whole request. So a request with somebody else's key in it
is none. A request is public; what is secret stays in the client's `secrets/`.

A client that wants other keys sends a request too, in which its present identity signs the next (`former`);
the new keys wait in `secrets/next/` until the authority has answered.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field

from trilemma.base import files
from trilemma.base.errors import PrivacyError, UserError
from trilemma.federation.identity import signed_files, tls_keys
from trilemma.federation.identity.rosters import (
    NAME,
    Former,
    Key,
    Member,
    Signature,
    SignedRoster,
    check_name,
    succession,
)
from trilemma.federation.identity.signed_files import Content, Ecdsa, Strict
from trilemma.federation.party.layout import Party
from trilemma.privacy.secrets import Identity, check_signature

LARGEST = 16384
"""Bytes of a request that is read."""
REQUEST = "request.json"


class _Content(Content):
    heading = b"trilemma request v1"
    version: Literal[1] = 1
    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    identity: Key
    certificate: Annotated[str, Field(max_length=4096)]
    former: Former | None = None


class _File(Strict):
    request: _Content
    identity: Signature
    tls: Ecdsa


@dataclass(frozen=True)
class RequestKeys:
    """The private halves of a client's keys, as files in `folder`."""

    folder: Path

    @property
    def identity(self) -> Path:
        """Its identity."""
        return self.folder / "identity.key"

    @property
    def tls(self) -> Path:
        """The key of its certificate."""
        return self.folder / "client.key"

    @property
    def public(self) -> str:
        """Its identity's public half."""
        return Identity.load(self.identity).public.hex()

    def into(self, secrets: Path) -> None:
        """Move them to where a client's own keys are, in place of those; what was moved before stays there.

        The identity goes last: as long as it waits, so does what belongs to it.
        """
        if not self.folder.is_dir():
            return
        for path in (self.tls, self.identity):
            if path.is_file():
                path.replace(secrets / path.name)
        self.folder.rmdir()
        files.sync_folder(secrets)


@dataclass(frozen=True)
class Request:
    """What a client asks for, checked: both keys are its sender's own."""

    name: str
    identity: str
    certificate: bytes
    former: Former | None = None

    def member(self) -> Member:
        """Return the line of the roster that is asked for."""
        return Member(name=self.name, identity=self.identity, tls=self.tls)

    @property
    def tls(self) -> str:
        """The digest of its TLS key."""
        return tls_keys.digest_of(tls_keys.requested_key(self.certificate))

    @classmethod
    def load(cls, path: Path) -> Request:
        """Read a file that anybody may have written."""
        try:
            return cls.read(signed_files.text_in(path, LARGEST))
        except UserError as error:
            raise UserError(f"{path} is no request that can be granted: {error}") from None

    @classmethod
    def read(cls, text: str) -> Request:
        """Read a request; refuse one whose sender does not have the keys it names."""
        found = signed_files.read(text, _File)
        content = found.request
        tls = tls_keys.requested_key(content.certificate.encode())
        try:
            check_signature(bytes.fromhex(content.identity), content.message, bytes.fromhex(found.identity))
            tls.verify(bytes.fromhex(found.tls), content.message, ec.ECDSA(hashes.SHA256()))
        except (PrivacyError, InvalidSignature):
            raise UserError(
                "it is not signed by the keys it names: whoever sent it does not have them"
            ) from None
        return cls(content.name, content.identity, content.certificate.encode(), content.former)


def make_request(folder: Path, name: str) -> Path:
    """Make a new client's keys in a new folder, and the request to be let in; return the request's file."""
    check_name(name)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; keys are never overwritten, choose a new folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise UserError(f"{folder} cannot be made: {error.strerror}") from None
    return _write(folder / REQUEST, new_keys(folder / "secrets"), name)


def request_rotation(client: Party) -> Path:
    """Make a client's next keys beside its present ones; its present identity, if it is there, signs.

    Keys that wait already are asked for once more: the authority may have granted them meanwhile.
    """
    assert client.client is not None
    member = client.signed_roster.clients[client.client]
    keys = next_keys(client)
    if not keys.folder.exists():
        keys = new_keys(keys.folder)
    former = None
    if client.identity.is_file():
        signature = succession(Identity.load(client.identity), bytes.fromhex(keys.public))
        former = Former(identity=member.identity, signature=signature)
    return _write(client.folder / REQUEST, keys, member.name, former)


def next_keys(client: Party) -> RequestKeys:
    """Return where a client's next keys wait for the authority's answer."""
    return RequestKeys(client.folder / "secrets" / "next")


def new_keys(folder: Path) -> RequestKeys:
    """Make a client's two keys in a folder of their own: all of them are there, or none."""
    begun = RequestKeys(folder.with_name(folder.name + ".tmp"))
    if begun.folder.exists():
        shutil.rmtree(begun.folder)
    begun.folder.mkdir(mode=0o700)
    Identity.generate().save(begun.identity)
    files.write_atomically(begun.tls, tls_keys.new_request("client")[0], secret=True)
    begun.folder.rename(folder)
    files.sync_folder(folder.parent)
    return RequestKeys(folder)


def _write(path: Path, keys: RequestKeys, name: str, former: Former | None = None) -> Path:
    files.write_atomically(path, request_for(keys, name, former).encode())
    return path


def request_for(keys: RequestKeys, name: str, former: Former | None = None) -> str:
    """Return a request for these keys, as text."""
    identity, tls = Identity.load(keys.identity), keys.tls.read_bytes()
    content = _Content(
        name=name,
        identity=identity.public.hex(),
        certificate=tls_keys.request_for(tls, "client").decode(),
        former=former,
    )
    return signed_files.text_of(
        _File(
            request=content,
            identity=identity.sign(content.message).hex(),
            tls=tls_keys.private_key(tls).sign(content.message, ec.ECDSA(hashes.SHA256())).hex(),
        )
    )


def check_new(request: Request, roster: SignedRoster) -> None:
    """Refuse a request for a name that means something else, or a name or key that the roster has or had."""
    check_name(request.name)
    for place, one in enumerate(roster.clients):
        if one.name == request.name:
            raise UserError(f"client {place} is called {request.name!r} already: choose another name")
    check_fresh(request, roster)


def check_fresh(request: Request, roster: SignedRoster) -> None:
    """Refuse keys that are on the roster, or were."""
    for place, one in enumerate(roster.clients):
        used = (one.identity, *(old.identity for old in one.former))
        if request.identity in used or request.tls == one.tls:
            raise UserError(f"a key of the request is, or was, client {place}'s: every client has its own")
