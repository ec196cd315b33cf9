"""`trilemma federation`, for a client's owner: what was proposed, and what the client may take part in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilemma.cli.federation_status import Folder
from trilemma.cli.output import note, say
from trilemma.errors import UserError

if TYPE_CHECKING:
    from trilemma.federation.layout import Party


def proposals_command(folder: Folder) -> None:
    """Show what was proposed to clients and is not allowed yet: what it would cost, and who takes part."""
    from trilemma.federation.proposals import proposed

    found = [(party, one) for party in _clients(folder) for one in proposed(party)]
    for party, one in found:
        cost = "no guarantee" if one.epsilon is None else f"ε = {one.epsilon:.3g}"
        who = f"{one.members} members, of whom {one.threshold} suffice"
        digests = {"configuration": one.configuration, "task": one.task, "keys": one.keys}
        say(f"{party.name}: {one.run}")
        say(f"    {cost}, {one.rounds} rounds, {who}")
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
) -> None:
    """Let a client take part in a run; its owner's decision, on its owner's machine."""
    from trilemma.federation.permission import allow_up_to, amend
    from trilemma.federation.proposals import allow

    if (run is None) == (epsilon is None):
        raise UserError("allow either a run, by its name, or in advance any run up to --epsilon")
    for party in _clients(folder):
        if run is not None:
            found = allow(party, run)
            cost = "no guarantee" if found.epsilon is None else f"ε = {found.epsilon:.3g}"
            said = f"run {run!r} of configuration {found.configuration[:12]}, {cost}"
            for line in found.left_out:
                note(f"{party.name}: {line.partition(': ')[2]}")
        elif epsilon is not None:
            amend(party.allowed, allow_up_to(epsilon))
            said = f"any run up to ε = {epsilon:g}"
        say(f"{party.name} allows {said}")


def _clients(folder: Path) -> list[Party]:
    from trilemma.federation.layout import WITHOUT_FACTS, parties, without_facts

    found = [party for party in parties(folder) if party.client is not None]
    for name in without_facts(folder):
        note(f"{name}: {WITHOUT_FACTS}")
    if not found:
        raise UserError(
            f"{folder} is the server's folder; what a client takes part in is decided by its owner"
        )
    return found


COMMANDS: dict[str, Callable[..., None]] = {"proposals": proposals_command, "allow": allow_command}
"""The commands of this module by name, for `trilemma federation`."""
