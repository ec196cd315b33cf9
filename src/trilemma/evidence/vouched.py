"""A party's ledger, vouched for by its owner: what it has spent in all, signed with the party's identity.

    {"account": {…}, "signature": …}

No server knows what a party has spent, so no server can say it: the owner reads the ledger on the party's own
machine (`trilemma evidence vouch`) and signs. The file has each mechanism and how often it ran, so that
everybody can compute ε again; it has no names of other runs. No record of the party's decides
anything in a ledger (SECURITY.md), so it tells nothing about records.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import Field

from trilemma.base.errors import UserError
from trilemma.evidence.facts import Counted, history
from trilemma.federation.client.account import CAVEAT, own_statement, position, run_of
from trilemma.federation.identity import signed_files
from trilemma.federation.identity.rosters import Key, Signature, SignedRoster
from trilemma.federation.identity.signed_files import Content, Strict
from trilemma.federation.party.layout import Party
from trilemma.privacy.ledger.ledger import cost
from trilemma.privacy.secrets import Identity, check_signature
from trilemma.privacy.types import Adjacency, Unit

LARGEST = 1 << 20


class LedgerAccount(Content):
    """What an owner signs about a ledger."""

    heading = b"trilemma ledger statement v1"
    federation: str
    client: int
    identity: Key
    run: str
    rounds: int
    epsilon: Annotated[float, Field(ge=0)]
    accountant: str
    delta: Annotated[float, Field(gt=0, lt=1)]
    budget: float
    unit: Unit
    adjacency: Adjacency
    releases: tuple[Counted, ...]
    lines: int
    head: str
    flower: bool = False
    """Whether the server could have sent other code (`trilemma.flower`): then ε holds against others."""

    def recomputed(self) -> float:
        """Return ε of all releases, computed once more."""
        found = dict(history(self.releases))
        return min(cost(found, self.delta).values()) if found else 0.0


class Vouched(Strict):
    """The file."""

    account: LedgerAccount
    signature: Signature

    @classmethod
    def load(cls, path: Path) -> Vouched:
        """Read a file that anybody may have written."""
        try:
            return signed_files.read(signed_files.text_in(path, LARGEST), cls)
        except UserError as error:
            raise UserError(f"{path.name} is no statement about a ledger: {error}") from None

    @property
    def text(self) -> str:
        """The file as it is written."""
        return signed_files.text_of(self)

    def check(self, roster: SignedRoster) -> LedgerAccount:
        """Return what it says; refuse it where its party is not on the roster, or has not signed it."""
        check_owner(roster, self.account.client, self.account.identity)
        if self.account.federation != roster.federation:
            raise UserError(f"it is about the federation {self.account.federation!r}")
        key = bytes.fromhex(self.account.identity)
        check_signature(key, self.account.message, bytes.fromhex(self.signature))
        found = self.account.recomputed()
        if not abs(found - self.account.epsilon) <= 1e-6 * max(found, 1e-12):
            raise UserError(f"it says ε = {self.account.epsilon:.6g}; its releases cost {found:.6g}")
        return self.account


def check_owner(roster: SignedRoster, client: int, identity: str) -> None:
    """Refuse a signer that is not on the roster, was removed, or has another key now."""
    if not 0 <= client < len(roster.clients):
        raise UserError(f"client {client} is not on the roster")
    if roster.clients[client].removed:
        raise UserError(f"client {client} was removed from the roster: its signature does not count")
    if roster.clients[client].identity != identity:
        raise UserError(f"client {client} has another key on the roster: this signature does not count")


def vouch(party: Party, run: str) -> Vouched:
    """Sign what a party's ledger says; for its owner, on its machine."""
    if party.client is None:
        raise UserError(
            f"{party.folder} is the server's: a ledger is a client's, and its owner vouches for it"
        )
    statement = own_statement(party)
    if statement.budget is None:
        raise UserError(f"{party.name} has released nothing yet: it has no ledger")
    by, epsilon = statement.spent
    if not by:
        by, epsilon = "nothing released", 0.0
    counted = Counter(entry.mechanism for entry in statement.entries)
    mine = [entry for entry in statement.entries if run_of(entry) == run]
    place, identity = position(party), Identity.load(party.identity)
    account = LedgerAccount(
        federation=party.signed_roster.federation,
        client=party.client,
        identity=identity.public.hex(),
        run=run,
        rounds=len({entry.round for entry in mine if not entry.run.endswith("/evaluation")}),
        epsilon=epsilon,
        accountant=by,
        delta=statement.budget.delta,
        budget=statement.budget.epsilon,
        unit=statement.budget.unit,
        adjacency=statement.budget.adjacency,
        releases=tuple(Counted(mechanism=asdict(one), count=count) for one, count in counted.items()),
        lines=place.length,
        head=place.digest,
        flower=any(CAVEAT in one.text for one in statement.remarks),
    )
    return Vouched(account=account, signature=identity.sign(account.message).hex())
