"""`trilemma federation`, as time goes by: who comes and goes, keys and certificates, budgets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilemma.base.errors import UserError
from trilemma.cli.federation_status import Folder
from trilemma.cli.output import say

if TYPE_CHECKING:
    from trilemma.federation.operations.membership import MembershipChange
    from trilemma.federation.party.layout import Party

Whole = Annotated[Path, typer.Argument(help="a federation's folder, with its authority/ in it")]
Own = Annotated[Path, typer.Argument(help="a client's own folder")]
Client = Annotated[
    str, typer.Argument(help="a client: its number, client-3, or the name it has on the roster")
]
RequestFile = Annotated[
    Path | None, typer.Option("--request", help="the client's request, where it made its keys itself")
]


def request_command(
    folder: Annotated[Path, typer.Argument(help="a new folder: the new client's own, on its own machine")],
    name: Annotated[str, typer.Option(help="the client's name on the roster")],
) -> None:
    """Make a new client's keys on its own machine, and a request to join, which holds no secret."""
    from trilemma.federation.party.requests import Request, make_request

    path = make_request(folder, name)
    say(f"{path}: send this file to the authority. The keys stay in {folder / 'secrets'}.")
    say(f"Read out to the authority, over the telephone: {_fingerprint(Request.load(path).identity)}")
    say(f"With the bundle that comes back: trilemma federation install {folder} BUNDLE")


def install_command(
    folder: Annotated[Path, typer.Argument(help="a party's folder, or one in which a request was made")],
    bundle: Annotated[Path, typer.Argument(help="the file that the authority sent")],
    task: Annotated[
        Path | None, typer.Option(help="a task.py with your model and data, where one was agreed on")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="the client's own limit on ε, over all runs")] = None,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(
            help="a plugin's file that the configuration names, with the digest agreed on; repeatable"
        ),
    ] = None,
) -> None:
    """Install a bundle of the authority: a new client's certificate and roster, or newer ones."""
    from trilemma.federation.identity.certificates import fingerprint, valid_until
    from trilemma.federation.operations import bootstrap
    from trilemma.federation.party.bundles import Bundle

    found = Bundle.load(bundle)
    first = bootstrap.is_new(folder)
    if not first and (task is not None or budget is not None or plugin):
        raise UserError("--task, --plugin and --budget are for a new client; its folder is there already")
    party, limit = bootstrap.installed(folder, found, task, budget, plugin or [])
    until = valid_until(party.certificate.read_bytes())
    say(f"{party.name}: certificate until {until:%Y-%m-%d}, roster {found.roster.serial}")
    if first:
        say(f"The authority's fingerprint, to be compared with what it says: {fingerprint(found.authority)}")
        say(f"Every client on the roster is counted on; look at them: trilemma federation roster {folder}")
        if limit is not None:
            say(f"It will spend at most ε = {limit:.3g} (budget.toml)")
        say(f"It takes part in nothing yet: trilemma federation allow {folder} RUN")
    _into_force([party])


def add_command(
    folder: Whole,
    request: Annotated[
        Path | None, typer.Argument(help="the new client's request; without one its folder is made here")
    ] = None,
) -> None:
    """Add a client: a new roster, which running parties adopt with the next epoch."""
    from trilemma.federation.operations import membership
    from trilemma.federation.party.requests import Request

    wanted = None if request is None else Request.load(request)
    change = membership.add(folder, wanted)
    member = change.roster.clients[change.client or 0]
    _report(change, f"client {change.client} ({member.name}) is on it, {_fingerprint(member.identity)}")
    if wanted is None:
        say(f"Whoever runs this saw its keys. To start it: trilemma federation up {folder}")


def remove_command(folder: Whole, client: Client) -> None:
    """Remove a client: a new roster; from the next epoch the others share new secrets."""
    from trilemma.federation.operations import membership

    change = membership.leave(folder, client)
    _report(change, f"client {change.client} is removed; nobody else's number changes")
    say("What it released stays in its own ledger. Its processes: trilemma federation down on its folder")


def rotate_command(
    folder: Annotated[Path, typer.Argument(help="a federation's folder; or a client's own, which then asks")],
    client: Annotated[str | None, typer.Argument(help="which client; not needed in its own folder")] = None,
    request: RequestFile = None,
    lost: Annotated[
        bool, typer.Option("--lost", help="the present identity is lost and cannot sign the new one")
    ] = False,
) -> None:
    """Give a client a new identity and TLS key; the old identity signs the new one."""
    from trilemma.federation.operations import membership
    from trilemma.federation.party import public_facts
    from trilemma.federation.party.layout import Party
    from trilemma.federation.party.requests import Request

    if client is None:
        if not (folder / public_facts.PUBLIC).is_file():
            raise UserError("say which client; allowed without: a client's own folder")
        party = Party.open(folder)
        if party.client is None:
            raise UserError("the server has no identity; for its certificate: trilemma federation renew")
        asked = membership.ask_for_keys(party)
        say(f"{asked}: send this file to the authority; the present keys serve until then")
        return
    wanted = None if request is None else Request.load(request)
    change = membership.rotate(folder, client, wanted, lost)
    member = change.roster.clients[change.client or 0]
    _report(change, f"client {change.client} has new keys, {_fingerprint(member.identity)}")


def renew_command(
    folder: Whole,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="new keys too, for parties whose folders are here")
    ] = False,
    authority: Annotated[
        bool, typer.Option("--authority", help="the authority's own certificate first, for ten more years")
    ] = False,
) -> None:
    """Renew the certificates of the server and all clients, for another year."""
    from trilemma.federation.identity.authority import Authority
    from trilemma.federation.identity.certificates import fingerprint, valid_until
    from trilemma.federation.operations import renewal
    from trilemma.federation.party.layout import parties

    done = renewal.renew(folder, fresh, authority)
    root = Authority.open(folder).certificate
    say(f"authority: certificate until {valid_until(root):%Y-%m-%d}")
    if authority:
        say(f"Its fingerprint from now on: {fingerprint(root)}")
        say("Its key is the same: parties that have the former certificate lose nothing until that one ends")
    for one in done:
        where = "" if one.bundle is None else f"; send {one.bundle} to it"
        say(f"{one.party}: certificate until {one.until:%Y-%m-%d}{where}")
    if any(one.here for one in done):
        _into_force([party for party in parties(folder) if party.client is None])
        say(f"Processes read them when they start: trilemma federation down {folder}, then up")


def budget_command(
    folder: Annotated[Path, typer.Argument(help="a federation's folder, or the client's own")],
    client: Annotated[str | None, typer.Argument(help="which client; not needed in its own folder")] = None,
    epsilon: Annotated[float | None, typer.Option(help="the new limit on ε, over all runs")] = None,
) -> None:
    """Show or change a client's own limit on ε, which is never below the ε spent."""
    from trilemma.federation.client.account import read_budget
    from trilemma.federation.client.spending import change_budget

    party = _one_client(folder, client)
    if epsilon is None:
        say(f"{party.name} spends at most ε = {read_budget(party).epsilon:g}")
        return
    before, spent = change_budget(party, epsilon)
    say(f"{party.name} spends at most ε = {epsilon:g} (before: {before:g}; spent: {spent:.3g})")


def roster_command(folder: Folder) -> None:
    """Show the roster with fingerprints to compare; on a client, also whom it counts on."""
    from trilemma.federation.party.adoption import strangers
    from trilemma.federation.party.layout import parties

    party = parties(folder)[0]
    roster = party.signed_roster
    unknown = [] if party.client is None else strangers(party)
    say(f"roster {roster.serial} of {roster.federation}, as {party.name} has it")
    for place, one in enumerate(roster.clients):
        note = ", removed" if one.removed else ", not vouched for" if place in unknown else ""
        say(f"  client {place} ({one.name}{note}): {_fingerprint(one.identity)}")


def vouch_command(
    folder: Own,
    clients: Annotated[list[str], typer.Argument(help="the clients it may count on from now on")],
) -> None:
    """Let a client count on clients that joined later, after comparing keys over another channel."""
    from trilemma.federation.party.adoption import vouch

    party = _one_client(folder, None)
    places = [party.signed_roster.place(name) for name in clients]
    vouch(party, places)
    say(f"{party.name} counts on clients {places}, as they are on roster {party.signed_roster.serial}")


def _one_client(folder: Path, client: str | None) -> Party:
    """Return the client that a folder is of, or that is named in a federation's folder."""
    from trilemma.federation.party.layout import WITHOUT_FACTS, parties, without_facts

    found = [party for party in parties(folder) if party.client is not None]
    if client in without_facts(folder):
        raise UserError(f"{client}: {WITHOUT_FACTS}")
    if client is not None and found:
        place = found[0].signed_roster.place(client)
        found = [party for party in found if party.client == place]
    if len(found) != 1:
        raise UserError(f"{folder} does not say which client; name one, or its own folder")
    return found[0]


def _fingerprint(identity: str) -> str:
    """Return an identity as people read it out: the key itself, in groups of four."""
    return " ".join(identity[place : place + 4] for place in range(0, len(identity), 4))


def _report(change: MembershipChange, what: str) -> None:
    say(f"roster {change.roster.serial}: {what}")
    for path in change.bundles:
        say(f"{path}: to be installed there: trilemma federation install FOLDER {path.name}")
    _into_force(list(change.here))


def _into_force(here: list[Party]) -> None:
    """Let processes that run here know: the server's at once, a client's by a new start."""
    from trilemma.federation.operations import deployment

    for party in here:
        if party.client is None:
            deployment.refresh(party)
        elif deployment.restart(party):
            say(f"{party.name} was started anew")


COMMANDS: dict[str, Callable[..., None]] = {
    "request": request_command,
    "install": install_command,
    "add-client": add_command,
    "remove-client": remove_command,
    "rotate": rotate_command,
    "renew": renew_command,
    "roster": roster_command,
    "vouch": vouch_command,
    "budget": budget_command,
}
"""The commands of this module by name, for `trilemma federation`."""
