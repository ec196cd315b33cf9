"""A client's secrets in one run: agreed on through the server, which can neither read nor forge them.

Per epoch a client makes one signed offer (`trilemma.privacy.secrets`), gets everybody's from the server,
checks every signature against ITS roster, and keeps the pair keys on its own disk. The ephemeral key lives in
the memory of the client's worker only, from the hello to the keys. A server that puts its own keys in the
middle, leaves out the signature, mixes runs or epochs, or changes its mind about the keys is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trilemma import files
from trilemma.errors import PrivacyError
from trilemma.federation import wire
from trilemma.federation.journal import Refused
from trilemma.federation.layout import Party
from trilemma.privacy.secrets import (
    Handshake,
    Identity,
    Offer,
    Roster,
    RunLog,
    SecretNoise,
    check_signature,
    run_digest,
)


def epoch_name(run: str, epoch: int) -> str:
    """Return the name under which the secrets of an epoch are agreed on.

    >>> epoch_name("monday", 2)
    'monday/2'
    """
    return f"{run}/{epoch}"


def check_offer(roster: Roster, run: str, epoch: int, client: int, text: str) -> None:
    """Refuse an offer that `client` did not sign for this epoch.

    The server checks too, so that one bad key costs its owner the epoch and not everybody; clients do not
    rely on that.
    """
    try:
        offer = Offer.decode(bytes.fromhex(text))
    except ValueError as error:
        raise wire.WireError(f"its key is not an offer: {error}") from None
    if offer.index != client or offer.run != run_digest(epoch_name(run, epoch)):
        raise wire.WireError("its key is for another client, run or epoch")
    try:
        check_signature(roster.keys[client], offer.signed(roster), offer.signature)
    except PrivacyError:
        raise wire.WireError("its key is not signed by its identity on the roster") from None


class _SessionHeader(wire.Header):
    kind = "session"
    epoch: int
    offer: str
    offers: dict[str, str]
    pairs: dict[str, str]


@dataclass(frozen=True)
class Secrets:
    """What a client knows in an epoch: its offer, and after the agreement everybody's and the pair keys."""

    epoch: int
    offer: str
    offers: Mapping[int, str]
    pairs: Mapping[int, bytes]

    @property
    def members(self) -> tuple[int, ...]:
        """The clients of the epoch, this one included; empty before the agreement."""
        return tuple(sorted(self.offers))


class Session:
    """One run of one client. The handshake under way is kept here; everything else is on disk."""

    def __init__(self, party: Party, run: str) -> None:
        self.party, self.run = party, run
        self._file = party.run_folder(run) / "session"
        self._handshake: Handshake | None = None

    @property
    def secrets(self) -> Secrets | None:
        """The newest epoch's secrets."""
        if not self._file.is_file():
            return None
        header, _ = wire.loads(self._file.read_bytes(), _SessionHeader)
        return Secrets(
            header.epoch,
            header.offer,
            {int(client): offer for client, offer in header.offers.items()},
            {int(client): bytes.fromhex(key) for client, key in header.pairs.items()},
        )

    def _write(self, secrets: Secrets) -> None:
        header = _SessionHeader(
            epoch=secrets.epoch,
            offer=secrets.offer,
            offers={str(client): offer for client, offer in secrets.offers.items()},
            pairs={str(client): key.hex() for client, key in secrets.pairs.items()},
        )
        files.write_atomically(self._file, wire.dumps(header), secret=True)

    def open(self, epoch: int) -> str:
        """Return this client's signed offer for an epoch, the same one however often the server asks.

        A newer epoch replaces the secrets of the older one.
        """
        known = self.secrets
        if known is not None and epoch <= known.epoch:
            if epoch < known.epoch:
                raise Refused(f"epoch {epoch} is over, this client is in epoch {known.epoch}")
            return known.offer
        if epoch < 0:
            raise Refused(f"there is no epoch {epoch}")
        self.party.state.mkdir(exist_ok=True)
        identity, roster = Identity.load(self.party.identity), Roster.load(self.party.roster)
        log = RunLog(self.party.state / "joined")
        self._handshake = Handshake(identity, roster, epoch_name(self.run, epoch), log)
        if self._handshake.index != self.party.client:
            raise Refused(f"this identity is client {self._handshake.index} on the roster")
        offer = self._handshake.offer.encode().hex()
        self._write(Secrets(epoch, offer, {}, {}))
        return offer

    def agree(self, epoch: int, offers: Mapping[int, str]) -> None:
        """Check everybody's offers and derive the pair keys; refuse a second, different set."""
        known = self.secrets
        if known is None or known.epoch != epoch:
            raise Refused(f"keys for epoch {epoch}, of which this client knows nothing")
        if known.offers:
            if dict(offers) != dict(known.offers):
                raise Refused(f"other keys for epoch {epoch} than those this client agreed to")
            return
        if self._handshake is None:
            raise Refused(f"this client was restarted while epoch {epoch} began; it can join the next one")
        if offers.get(self.party.client if self.party.client is not None else -1) != known.offer:
            raise Refused("the keys do not contain the one this client offered")
        try:
            decoded = [Offer.decode(bytes.fromhex(offer)) for offer in offers.values()]
            if [offer.index for offer in decoded] != list(offers):
                raise PrivacyError("offers are filed under the wrong clients")
            pairs = self._handshake.agree(decoded, partners=offers)
        except (PrivacyError, ValueError) as error:
            raise Refused(f"a key was not accepted: {error}") from None
        self._handshake = None
        self._write(Secrets(epoch, known.offer, offers, pairs))

    def require(self, epoch: int, agreed: bool) -> Secrets:
        """Return the secrets of an epoch that is ready to run, where need be with its keys `agreed` on."""
        known = self.secrets
        if known is None or known.epoch != epoch:
            raise Refused(f"a question in epoch {epoch}, which this client has not joined")
        if agreed and not known.offers:
            raise Refused(f"a question in epoch {epoch} before its keys were agreed on")
        return known

    def noise(self, secrets: Secrets) -> SecretNoise:
        """Return this client's source of noise."""
        assert self.party.client is not None
        return SecretNoise(self.party.client, secrets.pairs, self.party.reproducible_noise)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Write down what this client saw of a round, for itself."""
        with (self.party.run_folder(self.run) / "notes.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")
