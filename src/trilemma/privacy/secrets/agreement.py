"""Agreeing on pairwise secrets through a server that nobody trusts.

Once per run every client

1. draws an ephemeral X25519 key (RFC 7748) and signs an `Offer`: roster digest, run, its index, the public
   half;
2. gets everyone's offers through the server, and refuses any that an identity on its roster did not sign for
   this very run and roster;
3. derives with each partner the pair key HKDF-SHA256(X25519 shared secret; salt = roster digest; info = run,
   both indices, both public halves).

The server only carries offers. It cannot forge one (no identity), replay one from another run (the run is
signed), nor mix rosters (their digest is signed). A client joins a run once, and has to remember it: under
old offers the same noise would protect other gradients, and the difference would be bare. Ephemeral keys are
forgotten once used, so an identity stolen later opens no earlier run.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from trilemma.base.errors import PrivacyError, UserError
from trilemma.privacy.secrets.identity import Identity, Roster, check_signature
from trilemma.privacy.secrets.streams import derive

_WIRE = struct.Struct(">4sI32s32s64s")  # magic, index, run digest, ephemeral public key, signature
_MAGIC = b"TRo1"


def run_digest(run: str) -> bytes:
    """Return the 32 bytes that stand for a run's name.

    >>> len(run_digest("hospitals-2025-03"))
    32
    """
    if not run:
        raise UserError("a run needs a name: secrets are bound to it")
    return hashlib.sha256(b"trilemma run v1" + run.encode()).digest()


@dataclass(frozen=True)
class Offer:
    """A client's signed ephemeral public key for one run, 136 bytes on the wire.

    >>> offer = Offer(index=3, run=bytes(32), ephemeral=bytes(32), signature=bytes(64))
    >>> Offer.decode(offer.encode()) == offer
    True
    """

    index: int
    run: bytes
    ephemeral: bytes
    signature: bytes

    def encode(self) -> bytes:
        """Return the offer as bytes."""
        return _WIRE.pack(_MAGIC, self.index, self.run, self.ephemeral, self.signature)

    @classmethod
    def decode(cls, wire: bytes) -> Offer:
        """Read an offer; refuse anything else."""
        if len(wire) != _WIRE.size or not wire.startswith(_MAGIC):
            raise PrivacyError(f"not an offer: {_WIRE.size} bytes that begin with {_MAGIC!r} are expected")
        _, index, run, ephemeral, signature = _WIRE.unpack(wire)
        return cls(index, run, ephemeral, signature)

    def signed(self, roster: Roster) -> bytes:
        """Return what the signature is on."""
        return (
            b"trilemma offer v1" + roster.digest + self.run + struct.pack(">I", self.index) + self.ephemeral
        )

    def check_point(self) -> None:
        """Refuse a public half of low order, with which nobody can share a secret; anybody's key shows it.

        >>> Offer(index=3, run=bytes(32), ephemeral=bytes(32), signature=bytes(64)).check_point()
        Traceback (most recent call last):
        trilemma.base.errors.PrivacyError: client 3 sent a point of low order: ...
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        exchange(X25519PrivateKey.generate(), self.ephemeral, f"client {self.index}")


class Handshake:
    """One client's part in the agreement for one run. Use it once.

    >>> people = [Identity.generate() for _ in range(3)]
    >>> roster = Roster(tuple(p.public for p in people))
    >>> shakes = [Handshake(p, roster, "demo") for p in people]
    >>> offers = [s.offer for s in shakes]
    >>> keys = [s.agree(offers) for s in shakes]
    >>> keys[0][2] == keys[2][0], keys[0][1] == keys[0][2]
    (True, False)
    """

    def __init__(self, identity: Identity, roster: Roster, run: str) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.roster, self.index = roster, roster.index(identity.public)
        self._ephemeral: Any = X25519PrivateKey.generate()
        public = self._ephemeral.public_key().public_bytes_raw()
        unsigned = Offer(self.index, run_digest(run), public, b"")
        self.offer = replace(unsigned, signature=identity.sign(unsigned.signed(roster)))

    def agree(self, offers: Iterable[Offer], partners: Iterable[int] | None = None) -> dict[int, bytes]:
        """Return the pair key with each partner (everyone else, unless `partners` names some).

        Every offer is checked, those of others than the partners too.
        """
        if self._ephemeral is None:
            raise PrivacyError("these ephemeral keys are spent: begin a new handshake for a new run")
        checked: dict[int, Offer] = {}
        for offer in offers:
            self._check(offer)
            if checked.setdefault(offer.index, offer) != offer:
                raise PrivacyError(f"client {offer.index} made two different offers for one run")
        if checked.get(self.index, self.offer) != self.offer:
            raise PrivacyError("an offer in this client's name differs from the one it made")
        wanted = set(self.roster.members if partners is None else partners) - {self.index}
        if missing := sorted(wanted - checked.keys()):
            raise PrivacyError(
                f"no offer from clients {missing}: wait for them, or leave them out of `partners`"
            )
        keys = {other: self._pair_key(checked[other]) for other in sorted(wanted)}
        self._ephemeral = None
        return keys

    def _check(self, offer: Offer) -> None:
        key = self.roster.key(offer.index)
        if offer.run != self.offer.run:
            raise PrivacyError(f"client {offer.index}'s offer is for another run")
        try:
            check_signature(key, offer.signed(self.roster), offer.signature)
        except PrivacyError as error:
            raise PrivacyError(
                f"client {offer.index}'s offer is not signed by its identity for this run and roster"
            ) from error

    def _pair_key(self, theirs: Offer) -> bytes:
        first, second = sorted((self.offer, theirs), key=lambda offer: offer.index)
        info = b"trilemma pair v1" + first.run + struct.pack(">II", first.index, second.index)
        shared = exchange(self._ephemeral, theirs.ephemeral, f"client {theirs.index}")
        return derive(shared, self.roster.digest, info + first.ephemeral + second.ephemeral)


def exchange(private: Any, public: bytes, owner: str) -> bytes:
    """Return the X25519 shared secret; refuse a point of low order, with which it would be known to all."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return bytes(private.exchange(X25519PublicKey.from_public_bytes(public)))
    except ValueError as error:
        raise PrivacyError(
            f"{owner} sent a point of low order: its secret would be known to everyone"
        ) from error
