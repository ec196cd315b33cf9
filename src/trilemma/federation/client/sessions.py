"""A client's secrets in one run: agreed on through the server, which can neither read nor forge them.

Per epoch a client makes one signed offer (`trilemma.privacy.secrets`), gets everybody's from the server,
checks every signature against ITS roster, and keeps the pair keys on its own disk. Then it signs the list of
members and offers it has, gets everybody's signature, and answers in the epoch only if all signed that same
list (`confirmation`). The ephemeral key lives in the memory of the client's worker only, from the hello to
the keys. A server that puts its own keys in the middle, leaves out a signature, mixes runs or epochs, changes
its mind about the keys or about who was expelled, or tells two clients of two epochs is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from trilemma.base.errors import PrivacyError
from trilemma.federation.client.joined import JoinedEpochs
from trilemma.federation.party import sealed_files
from trilemma.federation.party.agreed import Agreed
from trilemma.federation.party.layout import Party
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.confirmation import Confirmation, MemberList, Position, Sighting, Witness
from trilemma.federation.protocol.events import listed
from trilemma.federation.protocol.expulsions import AnnouncedExpulsion, clients_of
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.privacy.secrets import (
    Handshake,
    Identity,
    Offer,
    Roster,
    SecretNoise,
    check_signature,
    run_digest,
)
from trilemma.privacy.threats.covariance import partners

LARGEST_NOTES = 4 << 20
"""Bytes after which notes are put aside and begun anew: where rounds cost nothing a server may ask for them
without end."""


def epoch_name(run: str, epoch: int) -> str:
    """Return the name under which the secrets of an epoch are agreed on.

    >>> epoch_name("monday", 2)
    'monday/2'
    """
    return f"{run}/{epoch}"


def apart(seed: bytes) -> bytes:
    """Return the seed, of a client whose noise can be drawn again, for what is in no message."""
    return hashlib.sha256(b"trilemma evaluation" + seed).digest()


def score_name(run: str, epoch: int) -> str:
    """Return the name under which a client's ledger has its evaluations in an epoch.

    >>> score_name("monday", 2)
    'monday/2/evaluation'
    """
    return f"{epoch_name(run, epoch)}/evaluation"


def check_offer(roster: Roster, run: str, epoch: int, client: int, text: str) -> None:
    """Refuse an offer that `client` did not sign for this epoch.

    The server checks too, so that one bad key costs its owner the epoch and not everybody; clients do not
    rely on that.
    """
    try:
        offer = Offer.decode(bytes.fromhex(text))
    except ValueError as error:
        raise wire.WireError(f"its key is not an offer: {error}") from None
    if offer.encode().hex() != text:  # everybody gets it as it is: no room for anything else
        raise wire.WireError("its key is written otherwise than keys are")
    if offer.index != client or offer.run != run_digest(epoch_name(run, epoch)):
        raise wire.WireError("its key is for another client, run or epoch")
    try:
        check_signature(roster.key(client), offer.signed(roster), offer.signature)
    except PrivacyError:
        raise wire.WireError("its key is not signed by its identity on the roster") from None
    try:
        offer.check_point()
    except PrivacyError as error:
        raise wire.WireError(str(error)) from None


class WentBack(Refused):
    """Members of an epoch have older ledgers than before; `shown` is what they signed then, where kept."""

    def __init__(self, detail: str, shown: Mapping[int, Sighting]) -> None:
        super().__init__(Reason.ROLLBACK, detail)
        self.shown = shown


class _SessionHeader(kinds.Header):
    kind = "session"
    epoch: int
    offer: str
    offers: dict[str, str]
    pairs: dict[str, str]
    terms: str
    plan: str
    confirmation: str = ""
    confirmed: bool = False
    expelled: list[AnnouncedExpulsion] = Field(default_factory=list)


class _ExpelledHeader(kinds.Header):
    kind = "told"
    expulsion: AnnouncedExpulsion


@dataclass(frozen=True)
class Secrets:
    """What a client knows in an epoch: its offer, and after the agreement everybody's and the pair keys.

    `terms` are those it joined under: an epoch ends where this client's own change, whatever was agreed on.
    `plan` is what its owner had allowed then, the code of its task with it.
    `confirmation` is its own signature under the list of members, `confirmed` whether it saw everybody's.
    `expelled` are those the server named in its call, all since the run began.
    """

    epoch: int
    offer: str
    offers: Mapping[int, str]
    pairs: Mapping[int, bytes]
    terms: str = ""
    confirmation: str = ""
    confirmed: bool = False
    expelled: tuple[AnnouncedExpulsion, ...] = ()
    plan: str = ""

    @property
    def members(self) -> tuple[int, ...]:
        """The clients of the epoch, this one included; empty before the agreement."""
        return tuple(sorted(self.offers))


class Session:
    """One run of one client. The handshake under way is kept here; everything else is on disk."""

    def __init__(self, party: Party, run: str) -> None:
        self.party, self.run = party, run
        self._file = party.run_folder(run) / "session"
        self._told = party.run_folder(run) / "expelled"
        self._handshake: Handshake | None = None

    @property
    def secrets(self) -> Secrets | None:
        """The newest epoch's secrets."""
        if not self._file.is_file():
            return None
        found = sealed_files.read(self._file, _SessionHeader)
        if found is None:
            return None  # as good as lost: its epoch is not joined again (`JoinedEpochs` has it), the next is
        header, _ = found
        if not self._is_own(header):
            return None  # another run's or another client's: noise from it would be somebody else's
        return Secrets(
            header.epoch,
            header.offer,
            {int(client): offer for client, offer in header.offers.items()},
            {int(client): bytes.fromhex(key) for client, key in header.pairs.items()},
            header.terms,
            header.confirmation,
            header.confirmed,
            tuple(header.expelled),
            header.plan,
        )

    def _is_own(self, header: _SessionHeader) -> bool:
        """Tell whether the offer in a file is this client's, for an epoch of this run."""
        try:
            offer = Offer.decode(bytes.fromhex(header.offer))
        except ValueError:
            return False
        return (offer.index, offer.run) == (self._client, run_digest(epoch_name(self.run, header.epoch)))

    def _write(self, secrets: Secrets) -> None:
        header = _SessionHeader(
            epoch=secrets.epoch,
            offer=secrets.offer,
            offers={str(client): offer for client, offer in secrets.offers.items()},
            pairs={str(client): key.hex() for client, key in secrets.pairs.items()},
            terms=secrets.terms,
            plan=secrets.plan,
            confirmation=secrets.confirmation,
            confirmed=secrets.confirmed,
            expelled=list(secrets.expelled),
        )
        sealed_files.write(self._file, header)

    @property
    def expelled(self) -> AnnouncedExpulsion | None:
        """Why this client was expelled from the run, where it was told so."""
        found = sealed_files.read(self._told, _ExpelledHeader) if self._told.is_file() else None
        return None if found is None else found[0].expulsion

    def leave(self, expulsion: AnnouncedExpulsion) -> None:
        """Write down that this client was expelled: it does not come back."""
        if self.expelled is None:
            sealed_files.write(self._told, _ExpelledHeader(expulsion=expulsion))

    def open(self, epoch: int, agreed: Agreed, expelled: Sequence[AnnouncedExpulsion] = ()) -> str:
        """Return this client's signed offer for an epoch, the same one however often the server asks.

        A newer epoch replaces the secrets of the older one. `expelled` are those the server names; what is
        wrong with a list that goes on from the last one is for `expulsions.check_announced`.
        """
        known = self.secrets
        if self.expelled is not None or self._client in clients_of(expelled):
            raise Refused(Reason.EXPELLED, f"this client was expelled from run {self.run!r}")
        if known is not None and epoch <= known.epoch:
            if epoch < known.epoch:
                raise Refused(Reason.EPOCH, f"epoch {epoch} is over, this client is in epoch {known.epoch}")
            if tuple(expelled) != known.expelled:
                raise Refused(Reason.EXPULSIONS, f"epoch {epoch} was called before, with other expulsions")
            return known.offer
        if epoch < 0:
            raise Refused(Reason.EPOCH, f"there is no epoch {epoch}")
        self.party.state.mkdir(exist_ok=True)
        try:
            identity = Identity.load(self.party.identity)
            handshake = Handshake(identity, agreed.roster.keys, epoch_name(self.run, epoch))
            if handshake.index != self.party.client:
                raise PrivacyError(f"this identity is client {handshake.index} on the roster")
            JoinedEpochs(self.party.state / "joined", self.party.state / "runs").claim(self.run, epoch)
        except PrivacyError as error:
            raise Refused(Reason.KEYS, str(error)) from None
        self._handshake, offer = handshake, handshake.offer.encode().hex()
        secrets = Secrets(epoch, offer, {}, {}, agreed.terms, expelled=tuple(expelled), plan=agreed.plan)
        self._write(secrets)
        return offer

    def agree(
        self,
        epoch: int,
        offers: Mapping[int, str],
        ledger: Position,
        roster: Roster,
        neighbours: int | None = None,
    ) -> str:
        """Check everybody's offers and derive the keys with all, or `neighbours`; refuse a second, other set.

        Return this client's confirmation of the list, with its ledger's position as it is now: the same one
        however often the server asks.
        """
        known = self.secrets
        if known is None or known.epoch != epoch:
            raise Refused(Reason.EPOCH, f"keys for epoch {epoch}, of which this client knows nothing")
        if known.offers:
            if dict(offers) != dict(known.offers):
                raise Refused(Reason.KEYS, f"other keys for epoch {epoch} than those this client agreed to")
            return known.confirmation
        if self._handshake is None:
            raise Refused(
                Reason.EPOCH, f"this client was restarted while epoch {epoch} began; it can join the next one"
            )
        if back := clients_of(known.expelled) & set(offers):
            raise Refused(
                Reason.EXPULSIONS, f"clients {listed(sorted(back))} were expelled, and are among the members"
            )
        if offers.get(self._client) != known.offer:
            raise Refused(Reason.KEYS, "the keys do not contain the one this client offered")
        try:
            decoded = [Offer.decode(bytes.fromhex(offer)) for offer in offers.values()]
            if [offer.index for offer in decoded] != list(offers):
                raise PrivacyError("offers are filed under the wrong clients")
            mine = partners(self._client, tuple(offers), neighbours)
            pairs = self._handshake.agree(decoded, partners=mine)
        except (PrivacyError, ValueError) as error:
            raise Refused(Reason.KEYS, f"a key was not accepted: {error}") from None
        self._handshake = None
        identity = Identity.load(self.party.identity)
        confirmation = Confirmation.sign(
            self._list(replace(known, offers=offers)),
            roster,
            self._client,
            ledger.covered(identity),
            identity,
        )
        self._write(replace(known, offers=offers, pairs=pairs, confirmation=confirmation.encode()))
        return confirmation.encode()

    def confirm(self, epoch: int, confirmations: Mapping[int, str], roster: Roster) -> None:
        """Check that every member signed the list this client has, and that nobody's ledger went back.

        Raises:
            WentBack: some did, and this shows it.
        """
        known = self.secrets
        if known is None or known.epoch != epoch or not known.offers:
            raise Refused(Reason.EPOCH, f"confirmations for epoch {epoch}, whose keys this client lacks")
        if known.confirmed:
            return
        if set(confirmations) != set(known.members):
            raise Refused(
                Reason.UNCONFIRMED,
                f"of clients {listed(known.members)} only {listed(sorted(confirmations))} confirmed",
            )
        members, shown = self._list(known), dict[int, Sighting]()
        try:
            for client, text in sorted(confirmations.items()):
                shown[client] = Confirmation.decode(text).check(members, roster, client)
        except PrivacyError as error:
            raise Refused(Reason.UNCONFIRMED, str(error)) from None
        del shown[self._client]  # of its own it knows more than what it once signed
        witness, ledgers = Witness(self.party.ledgers_seen), {one: shown[one].ledger for one in shown}
        try:
            witness.see(ledgers, shown)
        except PrivacyError as error:
            raise WentBack(str(error), witness.proofs(ledgers)) from None
        self._write(replace(known, confirmed=True))

    def check_terms(self, agreed: Agreed) -> None:
        """Refuse a run this client has not joined, or joined under other terms than its folder has now.

        A client that refuses a server's terms after a restart, of itself or of the server, refuses its
        questions too: an epoch from before the restart is no way around them. Nor is it a way around its
        owner, for code that was not asked about when the epoch was joined.
        """
        known = self.secrets
        if known is None:
            raise Refused(Reason.RUN, f"run {self.run!r}")
        if known.terms != agreed.terms:
            raise Refused(
                Reason.TERMS, f"epoch {known.epoch} was joined under {known.terms}, now {agreed.terms}"
            )
        if known.plan != agreed.plan:
            raise Refused(Reason.ALLOWED, f"epoch {known.epoch} was joined with another task")

    def require(self, epoch: int) -> Secrets:
        """Return the secrets of an epoch that is ready to run: its members have confirmed each other."""
        known = self.secrets
        if known is None or known.epoch != epoch:
            raise Refused(Reason.EPOCH, f"a question in epoch {epoch}, which this client has not joined")
        if self.expelled is not None:
            raise Refused(Reason.EXPELLED, f"this client was expelled from run {self.run!r}")
        if not known.confirmed:
            raise Refused(Reason.UNCONFIRMED, f"a question in epoch {epoch} before it was confirmed")
        return known

    @property
    def _client(self) -> int:
        assert self.party.client is not None
        return self.party.client

    def _list(self, secrets: Secrets) -> MemberList:
        return MemberList(self.run, secrets.epoch, secrets.terms, secrets.offers, secrets.expelled)

    def noise(self, secrets: Secrets, scale: float = 1.0) -> SecretNoise:
        """Return this client's source of noise; `scale` is what its message counts in the sum."""
        reproducible = self.party.reproducible
        seed = None if reproducible is None else reproducible.noise
        return SecretNoise(self._client, secrets.pairs, seed, scale=scale)

    def own_noise(self) -> SecretNoise:
        """Return the source of noise that is shared with nobody, and is in no message."""
        reproducible = self.party.reproducible
        seed = None if reproducible is None else apart(reproducible.noise)
        return SecretNoise(self._client, {}, seed)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Write down what this client saw of a round, for itself; where that is impossible nothing stops."""
        notes = self.party.run_folder(self.run) / "notes.jsonl"
        with contextlib.suppress(OSError):
            if notes.exists() and notes.stat().st_size > LARGEST_NOTES:
                notes.replace(notes.with_name(f"{notes.name}.1"))
            with notes.open("a") as file:
                file.write(json.dumps(facts) + "\n")
