"""What is wrong with a party, and what cures it: `trilemma federation doctor`, and the first look of `up`.

Each check is a function from a party to findings, and touches nothing. What a party can see by itself in a
moment (`at_start`) is asked before its processes are started, so that a wrong clock, a taken port, a
certificate that has run out or a full disk is named at once, by the party that has it, and not a minute later
by a process that ended. The rest takes the configuration to pieces, and compares what the parties have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trilemma import files
from trilemma.errors import UserError
from trilemma.federation import bundles, checks, processes, reaching
from trilemma.federation.checks import Finding
from trilemma.federation.facts import Facts
from trilemma.federation.layout import FACTS_BACK, NO_FACTS, Party, parties, without_facts
from trilemma.federation.peers import Door, clock_agrees, door_file

SILENT = 60.0
"""Seconds without a request after which a client is away: as long as its own program waits at most."""


@dataclass(frozen=True)
class Diagnosis:
    """A party and what is wrong with it."""

    party: str
    findings: tuple[Finding, ...]

    def plain(self) -> dict[str, object]:
        """Return JSON values."""
        return asdict(self)


def at_start(party: Party) -> list[Finding]:
    """Return what a party can see before it starts, within seconds; those that `stop` it leave no hope."""
    found = _all(party, checks.LOCAL)
    return [*found, *(reaching.findings(party) if party.client is not None else [])]


def check_start(party: Party, say: Callable[[str], None] = lambda _: None) -> None:
    """Refuse to start what cannot work, with all that is wrong and its cure; say the rest.

    A bundle of which a crash left only part in its place is finished first.
    """
    with files.locked(party.lock):
        if bundles.finish(party):
            say(f"{party.name}: what the authority sent was installed in part, and is now whole")
    found = at_start(party)
    hopeless = [one for one in found if one.stops]
    for one in found:
        if not one.stops:
            say(f"{party.name}: {one.text}")
    if hopeless:
        raise UserError("\n".join(f"{party.name} cannot start: {one.text}" for one in hopeless))


def examine(folder: Path) -> list[Diagnosis]:
    """Look at every party in `folder`, alone and beside the others."""
    everyone = parties(folder)
    first = everyone[0]
    found = []
    for party in everyone:
        own = _all(party, (installing, *checks.LOCAL, *checks.THOROUGH))
        if party.client is None:
            own += _guarded(seen_by_guard, party)
        else:
            own += reaching.findings(party)
        if party is not first:
            own += _guarded(beside, party, first)
        found.append(Diagnosis(party.name, tuple(own)))
    lost = (Finding("folder", NO_FACTS, FACTS_BACK, stops=True),)
    return [*found, *(Diagnosis(name, lost) for name in without_facts(folder))]


def _all(party: Party, every: tuple[Callable[[Party], Iterator[Finding]], ...]) -> list[Finding]:
    return [finding for check in every for finding in _guarded(check, party)]


def _guarded(check: Callable[..., Iterator[Finding]], *about: Party) -> list[Finding]:
    """Run a check; where a folder is so broken that it cannot be run, that is what it found."""
    try:
        return list(check(*about))
    except (UserError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        return [Finding("folder", f"cannot be read: {error}", "copy the party's folder once more", True)]


def installing(party: Party) -> Iterator[Finding]:
    """Tell of a bundle that was being installed when a crash came: whole, or broken by the disk since."""
    try:
        if bundles.unfinished(party) is not None:
            said = f"what the authority sent was installed in part ({party.installing.name})"
            yield Finding("bundle", said, "`trilemma federation up` finishes it")
    except UserError as error:
        yield Finding("bundle", str(error), "as it says", True)


def beside(party: Party, other: Party) -> Iterator[Finding]:
    """Compare two parties whose folders are here."""
    yield from reaching.compared(Facts.of(party), Facts.of(other), other.name)


def seen_by_guard(server: Party) -> Iterator[Finding]:
    """Tell what the server's guard saw of clients: who is away, whose clock or files are not the server's."""
    door = Door.load(door_file(server.running))
    guards = [one for one in processes.recorded(server.running) if one.name == "guard"]
    if door is None or not any(processes.leads(one) for one in guards):
        return
    own, now = Facts.of(server), time.time()
    for client, peer in sorted(door.peers.items()):
        if client not in server.signed_roster.nodes:
            continue
        if peer.asked is None or now - peer.asked > SILENT:
            since = (
                "has never asked for work"
                if peer.asked is None
                else f"was last heard {now - peer.asked:.0f} s ago"
            )
            yield Finding(
                "connection",
                f"client {client} {since}",
                f"its owner runs `trilemma federation doctor` on client-{client}'s folder",
            )
        if peer.clock is not None and not clock_agrees(peer.clock):
            yield Finding(
                "clock",
                f"client {client}'s clock is {peer.clock:+.0f} s off this server's: its requests are refused",
                "the one of the two machines whose clock is wrong sets it (NTP)",
            )
        if peer.facts is not None:
            yield from reaching.compared(own, peer.facts, f"client {client}")
