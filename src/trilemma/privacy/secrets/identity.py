"""Who is who: long-lived Ed25519 keys (RFC 8032) and the roster of those that are trusted."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trilemma.base.errors import PrivacyError, UserError


@dataclass(frozen=True)
class Identity:
    """A client's long-lived signing key.

    >>> alice = Identity.generate()
    >>> check_signature(alice.public, b"hello", alice.sign(b"hello"))
    >>> check_signature(alice.public, b"hullo", alice.sign(b"hello"))
    Traceback (most recent call last):
    trilemma.base.errors.PrivacyError: the signature does not belong to this message and key
    """

    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.seed) != 32:
            raise UserError(f"an identity is a seed of 32 bytes, got {len(self.seed)}")

    @classmethod
    def generate(cls) -> Identity:
        """Return a new identity from the operating system's generator."""
        return cls(os.urandom(32))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read the identity saved at `path`."""
        try:
            text = Path(path).read_text("ascii").strip()
            return cls(bytes.fromhex(text))
        except (OSError, ValueError) as error:
            raise UserError(f"no identity at {path}: {error}") from error

    def save(self, path: Path) -> None:
        """Write the identity to a new file that only its owner may read; never overwrite one."""
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise UserError(f"{path} exists: an identity is never overwritten") from error
        with os.fdopen(handle, "w") as file:
            file.write(self.seed.hex() + "\n")

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return bytes(self._key().public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """Return the signature of `message`, 64 bytes."""
        return bytes(self._key().sign(message))

    def _key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.seed)


def check_signature(public: bytes, message: bytes, signature: bytes) -> None:
    """Refuse a signature that `public` did not make on `message`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise PrivacyError("the signature does not belong to this message and key") from error


@dataclass(frozen=True)
class Roster:
    """The federation's public keys, client i's at place i. Everyone must hold the same one.

    A place is nobody else's ever after: who is `removed` keeps it, and signs for nothing any more.

    >>> alice, bob = Identity.generate(), Identity.generate()
    >>> roster = Roster((alice.public, bob.public))
    >>> roster.index(bob.public), roster.digest == Roster((bob.public, alice.public)).digest
    (1, False)
    >>> Roster(roster.keys, removed=frozenset({0})).members
    (1,)
    """

    keys: tuple[bytes, ...]
    removed: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for place, key in enumerate(self.keys):
            if len(key) != 32:
                raise UserError(f"a public key has 32 bytes; client {place}'s has {len(key)}")
        if len(set(self.keys)) != len(self.keys):
            raise UserError("two clients of the roster have the same public key")
        if not self.members:
            raise UserError("a roster lists at least one client")

    @property
    def members(self) -> tuple[int, ...]:
        """The places of those who are clients now."""
        return tuple(place for place in range(len(self.keys)) if place not in self.removed)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the roster: every secret is bound to it."""
        gone = json.dumps(sorted(self.removed)).encode() if self.removed else b""
        return hashlib.sha256(b"trilemma roster v1" + b"".join(self.keys) + gone).digest()

    def index(self, public: bytes) -> int:
        """Return the place of `public` in the federation."""
        for place in self.members:
            if self.keys[place] == public:
                return place
        raise PrivacyError(f"the key {public.hex()[:16]}… is not on the roster")

    def key(self, client: int) -> bytes:
        """Return the key by which `client` signs; refuse a place that is nobody's, or no longer."""
        if not 0 <= client < len(self.keys):
            raise PrivacyError(f"client {client} is not on the roster")
        if client in self.removed:
            raise PrivacyError(f"client {client} was removed from the roster")
        return self.keys[client]
