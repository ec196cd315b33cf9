"""One epoch, one list: members tell each other, signed, whom they share noise with, and since when.

A client's privacy depends on who else is in its epoch, and the server says who is. It might tell each client
another list. So before anything is released every member signs

    digest of (roster · run, epoch, terms · all members with their offers · who was expelled, and why) ·
    its own number · the state of its ledger

the server carries the signatures, and each member checks all of them over ITS OWN list: a signature that is
missing or on another list, and the client refuses the epoch. Members that all signed one list are in one
epoch; a liar among them counts as a liar, not as an absent one.

The state of a ledger is its length and a keyed digest of its last line. Who sees a member's ledger shorter
than before, or of equal length with another end, looks at a client that was set back to an older copy of
itself: it has forgotten releases, and would pay for them as if they had not been. What was seen is kept with
its signature: whoever saw the longer ledger can show it to a server that did not, or has forgotten, and one
client cannot keep the others from agreeing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import PrivacyError
from trilemma.base.typed import Count
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion
from trilemma.privacy.secrets import Identity, Roster, check_signature

SIGNATURE = re.compile("[0-9a-f]{128}")
LONGEST = 1 << 53
"""Lines that nobody's ledger has."""


@dataclass(frozen=True)
class Position:
    """How far a ledger has come: its number of lines, and a digest of the last."""

    length: Count = 0
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
    expelled: Sequence[AnnouncedExpulsion] = ()

    def digest(self, roster: Roster) -> str:
        """Return what stands for the list where it is signed."""
        facts: dict[str, object] = {
            "run": self.run,
            "epoch": self.epoch,
            "terms": self.terms,
            "offers": [[member, offer] for member, offer in sorted(self.offers.items())],
        }
        if self.expelled:
            facts["expelled"] = [one.model_dump() for one in self.expelled]
        text = json.dumps(facts, separators=(",", ":")).encode()
        return hashlib.sha256(b"trilemma members v2" + roster.digest + text).hexdigest()


@dataclass(frozen=True)
class Sighting:
    """A ledger's state as its owner signed it, under the list `agreed` (a digest): anybody can check it.

    >>> alice = Identity.generate()
    >>> sighting = Sighting.sign("list", 0, Position(4, "d"), alice)
    >>> sighting.check(alice.public, 0); Sighting.decode(sighting.encode()) == sighting
    True
    >>> sighting.check(alice.public, 1)
    Traceback (most recent call last):
    trilemma.base.errors.PrivacyError: client 1 did not sign this
    """

    agreed: str
    ledger: Position
    signature: str

    @classmethod
    def sign(cls, agreed: str, client: int, ledger: Position, identity: Identity) -> Sighting:
        """Sign a list and the state of a ledger as `client`."""
        return cls(agreed, ledger, identity.sign(_statement(agreed, client, ledger)).hex())

    def check(self, key: bytes, client: int) -> None:
        """Refuse what `client`, whose identity is `key`, did not sign."""
        try:
            signature = bytes.fromhex(self.signature)
            check_signature(key, _statement(self.agreed, client, self.ledger), signature)
        except (PrivacyError, ValueError):
            raise PrivacyError(f"client {client} did not sign this") from None

    def later_than(self, now: Position, client: int, identity: str, former: Sequence[str] = ()) -> Position:
        """Return where `client`'s ledger was, where that shows that it went back to `now`; else refuse.

        It has to be signed by the client's present identity or, as far as lengths go, by a former one, which
        covered the end of its ledger otherwise.
        """
        by = next((one for one in (identity, *former) if self._is_by(bytes.fromhex(one), client)), None)
        ledger = self.ledger if by == identity else Position(self.ledger.length)
        if by is None or not now.went_back(ledger):
            raise PrivacyError(f"nothing that shows that the ledger of client {client} went back")
        return ledger

    def _is_by(self, key: bytes, client: int) -> bool:
        try:
            self.check(key, client)
        except PrivacyError:
            return False
        return True

    def encode(self) -> str:
        """Return it as text."""
        return json.dumps([self.agreed, self.ledger.length, self.ledger.digest, self.signature])

    @classmethod
    def decode(cls, text: str) -> Sighting:
        """Read what `encode` wrote; refuse anything else."""
        try:
            agreed, *rest = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise PrivacyError("nothing that was seen") from None
        shown = Confirmation.decode(json.dumps(rest))
        if not isinstance(agreed, str) or len(agreed) > 64:
            raise PrivacyError("nothing that was seen under a list of members")
        return cls(agreed, shown.ledger, shown.signature)


def _statement(agreed: str, client: int, ledger: Position) -> bytes:
    """Return what a client signs."""
    facts = [agreed, client, ledger.length, ledger.digest]
    return b"trilemma epoch v2" + json.dumps(facts, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Confirmation:
    """A member's signature under a list, and the state of its ledger.

    >>> alice = Identity.generate(); roster = Roster((alice.public,))
    >>> members = MemberList("run", 0, "terms", {0: "offer"})
    >>> confirmation = Confirmation.sign(members, roster, 0, Position(), alice)
    >>> _ = confirmation.check(members, roster, 0)
    >>> confirmation.check(MemberList("run", 0, "terms", {0: "another"}), roster, 0)
    Traceback (most recent call last):
    trilemma.base.errors.PrivacyError: client 0 did not sign this list of members
    """

    ledger: Position
    signature: str

    @classmethod
    def sign(
        cls, members: MemberList, roster: Roster, client: int, ledger: Position, identity: Identity
    ) -> Confirmation:
        """Sign a list as `client`."""
        return cls(ledger, Sighting.sign(members.digest(roster), client, ledger, identity).signature)

    def check(self, members: MemberList, roster: Roster, client: int) -> Sighting:
        """Refuse a confirmation that `client` did not give for this very list; return what it shows."""
        shown = Sighting(members.digest(roster), self.ledger, self.signature)
        try:
            shown.check(roster.key(client), client)
        except PrivacyError:
            raise PrivacyError(f"client {client} did not sign this list of members") from None
        return shown

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
    trilemma.base.errors.PrivacyError: the ledger of client 0 has 3 lines, it had 4 before: ...
    """

    def __init__(self, path: Path) -> None:
        self._file = path

    def seen(self) -> dict[int, Position]:
        """Return what was seen of each client."""
        return {client: one.ledger for client, one in self._read().items()}

    def proofs(self, ledgers: Mapping[int, Position]) -> dict[int, Sighting]:
        """Return what shows that some of these ledgers went back, where it was kept."""
        known = self._read()
        back = [client for client, one in ledgers.items() if client in known and known[client].refuses(one)]
        found = {client: known[client].shown for client in back}
        return {client: one for client, one in found.items() if one is not None}

    def _read(self) -> dict[int, _Kept]:
        if not self._file.is_file():
            return {}
        try:
            found = json.loads(self._file.read_text())
            return {int(client): _Kept.of(**one) for client, one in found.items()}
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise PrivacyError(
                f"{self._file} is not as it was written: bring it back, or delete it and trust all there are"
            ) from None

    def check(self, client: int, ledger: Position) -> None:
        """Refuse a ledger that went back."""
        before = self._read().get(client, _Kept())
        if before.refuses(ledger):
            raise PrivacyError(
                f"the ledger of client {client} has {ledger.length} lines, it had {before.ledger.length} "
                "before: it was set back to an older copy, another one continues it, or two runs went on "
                "at once"
            )

    def forget_ends(self, clients: Iterable[int]) -> None:
        """Remember of these clients' ledgers the length alone: their ends are covered by other keys now.

        >>> import tempfile
        >>> witness = Witness(Path(tempfile.mkdtemp()) / "seen")
        >>> witness.see({0: Position(4, "d")}); witness.forget_ends([0])
        >>> witness.see({0: Position(4, "covered otherwise")})
        >>> witness.check(0, Position(3, "c"))
        Traceback (most recent call last):
        trilemma.base.errors.PrivacyError: the ledger of client 0 has 3 lines, it had 4 before: ...
        """
        with self._alone():
            known = self._read()
            kept = {client: known[client] for client in clients if client in known}
            moved = {client: _Kept(Position(one.ledger.length), one.shown) for client, one in kept.items()}
            if moved:
                self._write({**known, **moved})

    def see(self, ledgers: Mapping[int, Position], shown: Mapping[int, Sighting] | None = None) -> None:
        """Remember these positions, and what shows them, or refuse where one went back.

        On disk when this returns.
        """
        with self._alone():
            for client, ledger in ledgers.items():
                self.check(client, ledger)
            new = {client: _Kept(ledger, (shown or {}).get(client)) for client, ledger in ledgers.items()}
            self._write({**self._read(), **new})

    def recall(self, client: int, ledger: Position, shown: Sighting) -> None:
        """Remember where a client's ledger was before, as somebody else has shown."""
        with self._alone():
            known = self._read()
            if known.get(client, _Kept()).ledger.length <= ledger.length:
                self._write({**known, client: _Kept(ledger, shown)})

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let nobody else change what was read until it is written: `rotate` and a running party both do."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(self._file.with_name(f"{self._file.name}.lock")):
            yield

    def _write(self, known: Mapping[int, _Kept]) -> None:
        plain = {str(client): one.plain() for client, one in sorted(known.items())}
        files.write_atomically(self._file, json.dumps(plain).encode())


@dataclass(frozen=True)
class _Kept:
    """What a witness has of one client: how far its ledger was, and what shows it."""

    ledger: Position = Position()
    shown: Sighting | None = None

    @classmethod
    def of(cls, length: int, digest: str, shown: str = "") -> _Kept:
        return cls(Position(length, digest), Sighting.decode(shown) if shown else None)

    def plain(self) -> dict[str, object]:
        return {**asdict(self.ledger), "shown": self.shown.encode() if self.shown else ""}

    def refuses(self, now: Position) -> bool:
        """Tell whether a ledger that is there now cannot have been here."""
        return self.ledger.length > 0 and now.went_back(self.ledger)
