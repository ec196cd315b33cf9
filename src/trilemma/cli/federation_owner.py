"""`trilemma federation`, for a client's owner: what was proposed, and what the client may take part in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilemma.base.errors import UserError
from trilemma.cli.federation_status import Folder
from trilemma.cli.options import PluginOption
from trilemma.cli.output import note, say

if TYPE_CHECKING:
    from trilemma.federation.client.proposals import Manifest
    from trilemma.federation.party.layout import Party


def proposals_command(folder: Folder) -> None:
    """Show proposed runs that owners have not allowed yet: their cost and their members."""
    from trilemma.federation.client.proposals import proposed

    found = [(party, one) for party in _clients(folder) for one in proposed(party)]
    for party, one in found:
        who = f"{one.members} members, of whom {one.threshold} suffice"
        reach = () if one.reach is None else (one.reach.said,)
        digests = {"configuration": one.configuration, "task": one.task, "keys": one.keys}
        say(f"{party.name}: {one.run}")
        say("    " + "; ".join([f"{_cost(one)}, {one.rounds} rounds, {who}", *reach]))
        said = ", ".join(f"{name} {digest[:12]}" for name, digest in digests.items() if digest)
        say(f"    {said}")
    if not found:
        say("nothing was proposed that is not allowed")


def allow_command(
    folder: Folder,
    run: Annotated[str | None, typer.Argument(help="name of the run")] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="in advance: any run whose rounds cost at most this ε (inf: without a guarantee too)"
        ),
    ] = None,
    partly: Annotated[bool, typer.Option("--partly", help="also if the budget ends before the run")] = False,
) -> None:
    """Allow a client to take part in a run; the owner decides, on the owner's machine."""
    from trilemma.federation.client.proposals import allow, still_refused
    from trilemma.federation.party.permission import allow_up_to, amend

    if (run is None) == (epsilon is None):
        raise UserError("allow either a run, by its name, or in advance any run up to --epsilon")
    if partly and run is None:
        raise UserError("--partly goes with a run's name")
    for party in _clients(folder):
        if run is not None:
            found = allow(party, run, partly)
            said = f"run {run!r} of configuration {found.configuration[:12]}, {_cost(found)}"
            say(f"{party.name} allows {said}")
            if found.reach is not None:
                short = not found.reach.ends and not partly
                cure = "; it is refused unless you say --partly, or raise the budget" if short else ""
                say(f"{party.name}: {found.reach.said}{cure}")
            for line in found.left_out:
                note(f"{party.name}: {line.partition(': ')[2]}")
        elif epsilon is not None:
            amend(party.allowed, allow_up_to(epsilon))
            say(f"{party.name} allows any run up to ε = {epsilon:g}")
            for one in still_refused(party):
                say(f"{party.name} still refuses run {one.run!r}: {_cost(one)}")


def configure_command(
    folder: Folder,
    config: Annotated[str, typer.Argument(help="TOML file, or a name: what is run from now on")],
    plugin: PluginOption = None,
) -> None:
    """Put another configuration into the parties' folders that are here; ledgers and budgets stay.

    It is another plan: each client's owner allows it, as any. A pilot on one machine allows it at once.
    """
    from trilemma.cli.federation import settings_of, settled
    from trilemma.federation.operations.replanning import configure
    from trilemma.federation.party.layout import parties
    from trilemma.task import Task

    first = parties(folder)[0]
    facts = first.federation
    own = None if first.task is None else Task.from_file(first.task, facts.clients)
    settings = settled(settings_of(config, facts.clients, own, plugin or []), own, facts.examples)
    for party in configure(folder, settings):
        say(f"{party.folder}")
    if not facts.on_one_machine:
        say(
            "Every other party does the same; each owner then decides: trilemma federation allow client-i RUN"
        )


def say_reach(parties: Iterable[Party], run: str) -> None:
    """Say how far the budgets of the clients here reach in a run refused for that, and what owners can do."""
    from trilemma.federation.client.spending import reach
    from trilemma.federation.party.task import load_task

    for party in parties:
        far = None if party.client is None else reach(party, load_task(party), run)
        if far is not None:
            cure = f"; its owner: `trilemma federation allow {party.folder} {run} --partly`, or `budget`"
            say(f"{party.name}: {far.said}{'' if far.ends else cure}")


def _cost(found: Manifest) -> str:
    return "no guarantee" if found.epsilon is None else f"ε = {found.epsilon:.3g}"


def _clients(folder: Path) -> list[Party]:
    from trilemma.federation.party.layout import WITHOUT_FACTS, parties, without_facts

    found = [party for party in parties(folder) if party.client is not None]
    for name in without_facts(folder):
        note(f"{name}: {WITHOUT_FACTS}")
    if not found:
        raise UserError(
            f"{folder} is the server's folder; what a client takes part in is decided by its owner"
        )
    return found


COMMANDS: dict[str, Callable[..., None]] = {
    "proposals": proposals_command,
    "allow": allow_command,
    "configure": configure_command,
}
"""The commands of this module by name, for `trilemma federation`."""
