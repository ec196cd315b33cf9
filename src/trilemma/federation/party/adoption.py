"""How a new roster comes into force: only forwards, only the authority's, and between two epochs.

The server takes one from its operator and shows it in every hello; a client takes it from there, or from its
owner's hand. Neither believes the other: both check the signature against the authority's certificate in
their own folder, and that the roster follows the one they have. An epoch is over where its roster is: the
next one is agreed on, with fresh keys, by those who are on the new one.

Being on the roster is the authority's word. Whether a client counts on somebody's noise is its owner's: a
client knows the identities its folder was made with, those that a known one signed as its successor, and
those that its owner vouched for since (`trilemma federation vouch`). All others take part, and a release is
priced as if they lied and told the server everything: who signs rosters cannot lower anybody's noise by
inventing clients.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.identity import certificates
from trilemma.federation.identity.rosters import RosterError, SignedRoster, check_follows
from trilemma.federation.party.layout import Party
from trilemma.federation.party.provisioning import write_known
from trilemma.federation.protocol.confirmation import Witness


def adopt(party: Party, text: str) -> SignedRoster:
    """Bring a roster into force in a party's folder; the one that is in force already changes nothing.

    For who holds the folder's lock, where the party is a client.
    """
    authority = party.authority.read_bytes()
    if text == party.roster.read_text():
        return SignedRoster.read(text, authority)
    new, old = SignedRoster.read(text, authority), party.signed_roster
    check_follows(new, old)
    if new.serial == old.serial:
        return old
    end = certificates.valid_until(authority)
    if end < dt.datetime.now(dt.UTC):
        raise RosterError(f"the authority's certificate ended on {end:%Y-%m-%d}: it signs nothing any more")
    if party.client is not None:
        known = known_to(party)
        follows = {key for member in new.clients for key in member.successors(known)}
        write_known(party, known | follows)
    moved = [place for place, one in enumerate(old.clients) if one.identity != new.clients[place].identity]
    Witness(party.ledgers_seen).forget_ends(moved)
    new.save(party.roster)
    return new


def known_to(party: Party) -> set[str]:
    """Return the identities that a client counts on: none where its list is lost, until its owner vouches."""
    if not party.known.is_file():
        return set()
    try:
        found = json.loads(party.known.read_text())
        return {str(key) for key in found}
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{party.known} does not say whom this client knows: {error}") from None


def strangers(party: Party) -> list[int]:
    """Return the clients on a client's roster that it does not count on."""
    known, roster = known_to(party), party.signed_roster
    return [place for place in roster.keys.members if roster.clients[place].identity not in known]


def vouch(party: Party, clients: Iterable[int]) -> None:
    """Let a client count on these clients, as they are on its roster now: its owner's word."""
    roster = party.signed_roster
    know(party, [roster.clients[place].identity for place in clients])


def know(party: Party, identities: Iterable[str]) -> None:
    """Let a client count on these identities, whether they are on its roster yet or not.

    It waits for whoever works in the folder: a node that adopts a roster writes the same list.
    """
    with files.locked(party.lock):
        write_known(party, known_to(party) | set(identities))


def counted_on(party: Party, members: Iterable[int]) -> int:
    """Return how many of an epoch's members a client counts on, itself included."""
    unknown = set(strangers(party)) - {party.client}
    return len(set(members) - unknown)
