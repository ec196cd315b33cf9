"""What is wrong with a party, and what cures it: `trilemma federation doctor`, and the first look of `up`.

Each check is a function from a party to findings, and touches nothing. What a party can see by itself in a
moment (`at_start`) is asked before its process is started, so that a taken port, a certificate that has run
out, another version or a full disk is named at once, by the party that has it, and not by a log. The rest
takes the configuration to pieces, and compares what the parties have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.operations import checks, reaching
from trilemma.federation.operations.checks import Finding
from trilemma.federation.party import bundles
from trilemma.federation.party.facts import Facts
from trilemma.federation.party.layout import FACTS_BACK, NO_FACTS, Party, parties, without_facts
from trilemma.federation.processes.door import ask

PATIENCE = 5.0
"""Seconds for the server's process to say who is connected."""


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
            own += _guarded(seen_by_server, party)
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


def seen_by_server(server: Party) -> Iterator[Finding]:
    """Tell what the server's process sees of clients: who is away, and why; whose files are not its own."""
    try:
        (told,) = ask(server, seconds=PATIENCE, ask="status")
    except (UserError, TimeoutError):
        return
    own, there, turned_away = Facts.of(server), told["there"], told["turned_away"]
    for client in map(str, sorted(server.signed_roster.tls.values())):
        if client in there:
            yield from _compared(own, there[client]["facts"], f"client {client}")
        else:
            why = f": {turned_away[client]}" if client in turned_away else ""
            yield Finding(
                "connection",
                f"client {client} is not connected{why}",
                f"its owner runs `trilemma federation doctor` on client-{client}'s folder",
            )


def _compared(own: Facts, told: str, who: str) -> Iterator[Finding]:
    try:
        yield from reaching.compared(own, Facts.read(json.loads(told)), who)
    except (UserError, ValueError, RecursionError) as error:
        yield Finding("versions", f"what {who} says it has cannot be read: {error}", "see its version")
