"""The roster: who is in a federation, signed by its authority. All else about membership follows from it.

    {"roster": {"version": 2, "federation": …, "serial": …, "clients": [{name, identity, tls, …}, …]},
     "signature": …}

Client i is the i-th of `clients`, for good: who is removed keeps its place, who comes later gets a new one.
Each roster has a serial number, and a party that has seen one takes none with a smaller number. The signature
is the authority's (ECDSA, P-256, the key of its certificate) on what the roster says (`signed_files`).

A client that exchanges its keys stays who it was: its former identity signs the new one, and the signatures
stay on the roster (`former`), for parties that believe the authority about certificates and each other about
who they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from trilemma.base import files
from trilemma.base.errors import PrivacyError, UserError
from trilemma.base.typed import complaint
from trilemma.federation.identity import certificates, signed_files
from trilemma.federation.identity.signed_files import Content, Ecdsa, Strict
from trilemma.privacy.secrets import Identity, Roster, check_signature

LARGEST = 800_000
"""Characters of a roster that is read: some two thousand clients, and what a block's header can carry."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = re.compile(r"\d+|server|authority|client-\d+", re.IGNORECASE)
"""Names that somebody might take for a party's folder or a client's number."""

Key = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern="^[0-9a-f]{128}$")]


class RosterError(PrivacyError):
    """A roster that is not believed."""


class Former(Strict):
    """An identity that a client had before, and its signature under the one that came after it."""

    identity: Key
    signature: Signature | None = None
    """None where the former identity was lost: then the authority alone says who follows."""


class Member(Strict):
    """One client: its name, its identity (Ed25519, the public half) and its TLS key (P-256, the digest)."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    identity: Key
    tls: Key
    removed: bool = False
    former: Annotated[tuple[Former, ...], Field(max_length=64)] = ()
    weight: Annotated[float | None, Field(gt=0, exclude_if=lambda weight: weight is None)] = None
    """Its public weight, as the configuration says it; None where all are alike."""

    def successors(self, known: Iterable[str]) -> set[str]:
        """Return those of this client's identities that follow, signature by signature, from known ones.

        >>> old, new = Identity(bytes(32)), Identity(bytes([1] * 32))
        >>> signed = Former(identity=old.public.hex(), signature=succession(old, new.public))
        >>> moved = Member(name="a", identity=new.public.hex(), tls="0" * 64, former=(signed,))
        >>> moved.successors({old.public.hex()}) == {new.public.hex()}
        True
        >>> moved.successors(set())
        set()
        """
        trusted, found = set(known), set()
        identities = [*(one.identity for one in self.former), self.identity]
        for one, after in zip(self.former, identities[1:], strict=True):
            if one.identity in trusted and _succeeds(one, after):
                trusted.add(after)
                found.add(after)
        return found


def succession(former: Identity, public: bytes) -> str:
    """Return the signature by which an identity names the one that comes after it."""
    return former.sign(b"trilemma succession v1" + public).hex()


def _succeeds(former: Former, after: str) -> bool:
    if former.signature is None:
        return False
    try:
        message = b"trilemma succession v1" + bytes.fromhex(after)
        check_signature(bytes.fromhex(former.identity), message, bytes.fromhex(former.signature))
    except PrivacyError:
        return False
    return True


class _Content(Content):
    heading = b"trilemma signed roster v2"
    version: Literal[2] = 2
    federation: Annotated[str, Field(max_length=200)]
    serial: Annotated[int, Field(ge=1, lt=1 << 53)]
    clients: Annotated[tuple[Member, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _everybody_differs(self) -> Self:
        for what, found in {
            "name": [one.name for one in self.clients],
            "TLS key": [one.tls for one in self.clients],
            "identity": [
                key for one in self.clients for key in (one.identity, *(old.identity for old in one.former))
            ],
        }.items():
            if len(set(found)) < len(found):
                raise ValueError(f"two clients of the roster have the same {what}")
        if all(one.removed for one in self.clients):
            raise ValueError("a roster lists at least one client")
        return self


class _File(Strict):
    roster: _Content
    signature: Ecdsa


@dataclass(frozen=True)
class SignedRoster:
    """A roster and the authority's signature. Two that say the same are equal, whatever their signatures.

    >>> authority = certificates.new_authority("demo")
    >>> alice = Member(name="alice", identity=Identity.generate().public.hex(), tls="0" * 64)
    >>> roster = SignedRoster.sign(authority, "demo", 1, (alice,))
    >>> SignedRoster.read(roster.text, authority.certificate) == roster
    True
    >>> SignedRoster.read(roster.text, certificates.new_authority("demo").certificate)
    Traceback (most recent call last):
    trilemma.federation.identity.rosters.RosterError: the roster is not signed by this federation's authority
    """

    federation: str
    serial: int
    clients: tuple[Member, ...]
    signature: str = field(compare=False)

    @classmethod
    def sign(
        cls, authority: certificates.Issued, federation: str, serial: int, clients: tuple[Member, ...]
    ) -> SignedRoster:
        """Sign a roster, where its content is one."""
        try:
            content = _Content(federation=federation, serial=serial, clients=clients)
        except ValidationError as error:
            raise RosterError(f"that would be no roster: {complaint(error)}") from None
        return cls(federation, serial, clients, authority.sign(content.message).hex())

    @classmethod
    def read(cls, text: str, authority: bytes) -> SignedRoster:
        """Read what anybody may have written; refuse what `authority` (a certificate) has not signed."""
        if len(text) > LARGEST:
            raise RosterError(f"a roster of {len(text)} characters is not read; at most {LARGEST}")
        return _read(text, authority)

    @classmethod
    def load(cls, path: Path, authority: Path) -> SignedRoster:
        """Read a party's roster, as its authority's certificate vouches for it."""
        try:
            return cls.read(path.read_text(errors="replace"), authority.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"no roster at {path}: {error}") from error

    def save(self, path: Path) -> None:
        """Write the roster; on disk, whole, when this returns."""
        files.write_atomically(path, self.text.encode())

    @property
    def text(self) -> str:
        """The roster as a file holds it, and a hello carries it."""
        return signed_files.text_of(_File.model_construct(roster=self._content, signature=self.signature))

    @property
    def message(self) -> bytes:
        """The one text that stands for what it says."""
        return self._content.message

    @property
    def _content(self) -> _Content:
        # Checked when it was signed or read.
        return _Content.model_construct(federation=self.federation, serial=self.serial, clients=self.clients)

    @property
    def keys(self) -> Roster:
        """Everybody's identities, as secrets are bound to them."""
        gone = frozenset(place for place, one in enumerate(self.clients) if one.removed)
        return Roster(tuple(bytes.fromhex(one.identity) for one in self.clients), gone)

    @property
    def tls(self) -> dict[str, int]:
        """Who is a client now, by the digest of the TLS key with which it comes."""
        return {self.clients[place].tls: place for place in self.keys.members}

    def place_of(self, identity: bytes) -> int:
        """Return the place of the client that has this identity, or had it before."""
        for place, one in enumerate(self.clients):
            if identity.hex() in (one.identity, *(old.identity for old in one.former)):
                return place
        raise RosterError("this identity is not on the roster")

    def place(self, name: str) -> int:
        """Return the place of a client that is called by its number, its folder's name or its own name."""
        number = name.removeprefix("client-")
        found = [int(number)] if number.isdigit() else []
        found += [place for place, one in enumerate(self.clients) if one.name == name]
        for place in found:
            if place < len(self.clients):
                if self.clients[place].removed:
                    raise UserError(f"client {name} was removed from the roster before")
                return place
        names = ", ".join(f"{place} ({self.clients[place].name})" for place in self.keys.members)
        raise UserError(f"there is no client {name!r}; allowed: {names}")


@lru_cache(maxsize=4)
def _read(text: str, authority: bytes) -> SignedRoster:
    """Read and check a roster; the same one is asked for with every question, and stays what it is."""
    try:
        found = signed_files.read(text, _File)
    except UserError as error:
        raise RosterError(f"this is no roster: {error}") from None
    content = found.roster
    certificates.check_signed(
        authority,
        content.message,
        bytes.fromhex(found.signature),
        RosterError("the roster is not signed by this federation's authority"),
    )
    return SignedRoster(content.federation, content.serial, content.clients, found.signature)


def check_name(name: str) -> str:
    """Return a name that a client may give itself, or say what is allowed.

    >>> check_name("st-marys")
    'st-marys'
    >>> check_name("../../server")
    Traceback (most recent call last):
    trilemma.base.errors.UserError: '../../server' is no name for a client; allowed: letters, ...
    """
    if not NAME.fullmatch(name):
        raise UserError(f"{name[:80]!r} is no name for a client; allowed: letters, digits, . _ -, at most 64")
    if RESERVED.fullmatch(name):
        raise UserError(f"{name!r} is no name for a client: it would be taken for a party's number or folder")
    return name


def check_follows(new: SignedRoster, old: SignedRoster) -> None:
    """Refuse a roster that cannot come after `old`: an older one, another federation's, or one that moves.

    Nobody's place changes, and who was removed stays removed. What a client was before stays on the roster,
    as it was: an identity that has one successor could otherwise have another, at another place.
    """
    if new.federation != old.federation:
        raise RosterError(f"the roster is of the federation {new.federation!r}, not of {old.federation!r}")
    if new.serial < old.serial:
        raise RosterError(f"roster {new.serial} is older than roster {old.serial}, which is in force here")
    if new.serial == old.serial:
        if new.clients != old.clients:
            raise RosterError(f"there are two rosters with the number {new.serial}; ask the authority")
        return
    if len(new.clients) < len(old.clients):
        raise RosterError("the roster has lost places: clients keep theirs")
    for place, (before, after) in enumerate(zip(old.clients, new.clients, strict=False)):
        if before.removed and not after.removed:
            raise RosterError(f"client {place} was removed; its place is nobody else's")
        if before.name != after.name:
            raise RosterError(f"place {place} was {before.name}'s, and is given to {after.name}")
        since = after.former[len(before.former) :]
        if after.former[: len(before.former)] != before.former:
            raise RosterError(f"the roster has forgotten which identities client {place} had before")
        if before.weight != after.weight:
            raise RosterError(f"client {place} has another weight than before")
        if before.identity != (since[0].identity if since else after.identity):
            raise RosterError(f"the roster does not say which identity client {place} had before")
