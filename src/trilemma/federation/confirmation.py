"""One epoch, one list: members tell each other, signed, whom they share noise with, and since when.

A client's privacy depends on who else is in its epoch, and the server says who is. It might tell each client
another list. So before anything is released every member signs

    roster · run, epoch, terms · all members with their offers · who was expelled, and why · its own number ·
    the state of its ledger

the server carries the signatures, and each member checks all of them over ITS OWN list: a signature that is
missing or on another list, and the client refuses the epoch. Members that all signed one list are in one
epoch; a liar among them counts as a liar, not as an absent one.

The state of a ledger is its length and a keyed digest of its last line. Who sees a member's ledger shorter
than before, or of equal length with another end, looks at a client that was set back to an older copy of
itself: it has forgotten releases, and would pay for them as if they had not been.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trilemma import files
from trilemma.errors import PrivacyError
from trilemma.federation.expulsions import Expulsion
from trilemma.privacy.secrets import Identity, Roster, check_signature

SIGNATURE = re.compile("[0-9a-f]{128}")
LONGEST = 1 << 53
"""Lines that nobody's ledger has."""


@dataclass(frozen=True)
class Position:
    """How far a ledger has come: its number of lines, and a digest of the last."""

    length: int = 0
    digest: str = ""

    def covered(self, identity: Identity) -> Position:
        """Return the position as others are shown it: they can compare it, and guess nothing from it.

        >>> one, other = Identity(bytes(32)), Identity(bytes([1] * 32))
        >>> Position(3, "ab").covered(one) == Position(3, "ab").covered(other)
        False
        """
        secret = hmac.new(identity.seed, b"trilemma ledger v1" + self.digest.encode(), hashlib.sha256)
        return Position(self.length, secret.hexdigest())

    def went_back(self, before: Position) -> bool:
        """Tell whether a ledger here cannot have been at `before` earlier.

        >>> Position(3, "c").went_back(Position(4, "d")), Position(4, "e").went_back(Position(4, "d"))
        (True, True)
        >>> Position(5, "f").went_back(Position(4, "d"))
        False
        """
        if self.length != before.length:
            return self.length < before.length
        return before.digest not in ("", self.digest)


@dataclass(frozen=True)
class MemberList:
    """What the members of an epoch agree on: which run and terms, everybody's offers, who was expelled."""

    run: str
    epoch: int
    terms: str
    offers: Mapping[int, str]
    expelled: Sequence[Expulsion] = ()

    def statement(self, roster: Roster, client: int, ledger: Position) -> bytes:
        """Return what `client`, whose ledger is at `ledger`, signs."""
        facts: dict[str, object] = {
            "run": self.run,
            "epoch": self.epoch,
            "terms": self.terms,
            "offers": [[member, offer] for member, offer in sorted(self.offers.items())],
            "client": client,
            "ledger": [ledger.length, ledger.digest],
        }
        if self.expelled:
            facts["expelled"] = [one.model_dump() for one in self.expelled]
        return b"trilemma epoch v1" + roster.digest + json.dumps(facts, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Confirmation:
    """A member's signature under a list, and the state of its ledger.

    >>> alice = Identity.generate(); roster = Roster((alice.public,))
    >>> members = MemberList("run", 0, "terms", {0: "offer"})
    >>> confirmation = Confirmation.sign(members, roster, 0, Position(), alice)
    >>> confirmation.check(members, roster, 0)
    >>> confirmation.check(MemberList("run", 0, "terms", {0: "another"}), roster, 0)
    Traceback (most recent call last):
    trilemma.errors.PrivacyError: client 0 did not sign this list of members
    """

    ledger: Position
    signature: str

    @classmethod
    def sign(
        cls, members: MemberList, roster: Roster, client: int, ledger: Position, identity: Identity
    ) -> Confirmation:
        """Sign a list as `client`."""
        return cls(ledger, identity.sign(members.statement(roster, client, ledger)).hex())

    def check(self, members: MemberList, roster: Roster, client: int) -> None:
        """Refuse a confirmation that `client` did not give for this very list."""
        try:
            signature = bytes.fromhex(self.signature)
            check_signature(roster.key(client), members.statement(roster, client, self.ledger), signature)
        except (PrivacyError, ValueError):
            raise PrivacyError(f"client {client} did not sign this list of members") from None

    def encode(self) -> str:
        """Return the confirmation as text."""
        return json.dumps([self.ledger.length, self.ledger.digest, self.signature])

    @classmethod
    def decode(cls, text: str) -> Confirmation:
        """Read a confirmation; refuse anything else."""
        try:
            length, digest, signature = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise PrivacyError("not a confirmation") from None
        if type(length) is not int or length < 0 or not isinstance(digest, str) or len(digest) > 64:
            raise PrivacyError("not a confirmation: a ledger has a length and a digest")
        if length >= LONGEST or not isinstance(signature, str) or not SIGNATURE.fullmatch(signature):
            raise PrivacyError("not a confirmation: nobody's ledger and signature are so long")
        return cls(Position(length, digest), signature)


class Witness:
    """The furthest state of everybody's ledger that this party has seen signed, in a file.

    >>> import tempfile
    >>> witness = Witness(Path(tempfile.mkdtemp()) / "seen")
    >>> witness.see({0: Position(4, "d"), 1: Position(1, "a")})
    >>> witness.see({0: Position(3, "c")})
    Traceback (most recent call last):
    trilemma.errors.PrivacyError: the ledger of client 0 has 3 lines, it had 4 before: ...
    """

    def __init__(self, path: Path) -> None:
        self._file = path

    def seen(self) -> dict[int, Position]:
        """Return what was seen of each client."""
        if not self._file.is_file():
            return {}
        try:
            found = json.loads(self._file.read_text())
            return {int(client): Position(**position) for client, position in found.items()}
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise PrivacyError(
                f"{self._file} is not as it was written: bring it back, or delete it and trust all there are"
            ) from None

    def check(self, client: int, ledger: Position) -> None:
        """Refuse a ledger that went back."""
        before = self.seen().get(client, Position())
        if before.length and ledger.went_back(before):
            raise PrivacyError(
                f"the ledger of client {client} has {ledger.length} lines, it had {before.length} before: it "
                "was set back to an older copy, or another one continues it"
            )

    def forget_ends(self, clients: Iterable[int]) -> None:
        """Remember of these clients' ledgers the length alone: their ends are covered by other keys now.

        >>> import tempfile
        >>> witness = Witness(Path(tempfile.mkdtemp()) / "seen")
        >>> witness.see({0: Position(4, "d")}); witness.forget_ends([0])
        >>> witness.see({0: Position(4, "covered otherwise")})
        >>> witness.check(0, Position(3, "c"))
        Traceback (most recent call last):
        trilemma.errors.PrivacyError: the ledger of client 0 has 3 lines, it had 4 before: ...
        """
        known = self.seen()
        if moved := {client: Position(known[client].length) for client in clients if client in known}:
            self._write({**known, **moved})

    def see(self, ledgers: Mapping[int, Position]) -> None:
        """Remember these positions, or refuse where one went back; on disk when this returns."""
        for client, ledger in ledgers.items():
            self.check(client, ledger)
        self._write({**self.seen(), **ledgers})

    def _write(self, known: Mapping[int, Position]) -> None:
        plain = {str(client): asdict(position) for client, position in sorted(known.items())}
        files.write_atomically(self._file, json.dumps(plain).encode())
