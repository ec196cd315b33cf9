"""`trilemma attack`: what somebody who has the final model finds out, beside what is certified."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilemma.base.errors import UserError
from trilemma.cli.output import note, say

if TYPE_CHECKING:
    from trilemma.audit.final.found import Attacks

OWN = "this was found out with your own records, and no ε covers it: it is for you alone"
LABEL = "no ε covers these measurements: they tell something about the records they were made with"


def attack_command(
    source: Annotated[
        Path,
        typer.Argument(help="the folder of a run, of a federation's client or server; or model.safetensors"),
    ],
    task: Annotated[
        Path | None, typer.Option(help="with model.safetensors: the task.py with its records")
    ] = None,
    run: Annotated[str | None, typer.Option(help="which of a federation's runs, if it has several")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of a simulated run; default: the first")] = None,
    shadows: Annotated[
        int, typer.Option(min=0, max=256, help="models that LiRA trains, each as long as the run; 0: no LiRA")
    ] = 0,
    canaries: Annotated[int, typer.Option(min=1, help="canaries in the one-run attack")] = 1000,
    out: Annotated[Path | None, typer.Option(help="write attacks.json, for an evidence pack")] = None,
) -> None:
    """Attack a final model: membership, attributes, inversion, a mark; each beside what is certified.

    From a client's folder the attack uses that client's own records. Nothing is sent.

    Exit code 1 if an attack exceeds what is certified, 2 for bad input.
    """
    from trilemma.audit.final import run as attacking
    from trilemma.base import files
    from trilemma.evidence.gather import digest_of
    from trilemma.federation.client.at_home import client_in

    if shadows % 2:
        raise UserError(
            f"--shadows {shadows}: they come in pairs, each trained on one half; allowed: 0, 2, 4, …"
        )
    if out is not None and out.exists():
        raise UserError(f"{out} is there already: name a new file")
    own = client_in(source) is not None
    deployed = own or any((path / "federation.toml").is_file() for path in (source, source / "server"))
    if deployed and (seed is not None or shadows):
        raise UserError("--seed and --shadows are for simulated runs")
    if (task is not None) != source.is_file():
        raise UserError("--task goes with a model's file; a folder knows its own task")
    if task is not None:
        found = attacking.on_file(source, task, digest_of)
    elif own:
        found = attacking.on_client(source, run, digest_of, canaries)
    elif deployed:
        found = attacking.on_server(source, run, digest_of, canaries)
    else:
        found = attacking.on_run(source, digest_of, seed, shadows, canaries)
    _show(found)
    note(f"note: {OWN if own else LABEL}")
    if out is not None:
        files.write_atomically(out, found.text.encode())
    if any(one.exceeds for one in found.tried):
        raise typer.Exit(1)


def _show(found: Attacks) -> None:
    """Print a line for each attack, and why others were not tried."""
    say(f"promise: {found.promise}")
    for one in found.tried:
        say(f"{'EXCEEDED: ' if one.exceeds else ''}{one.sentence}")
    for name, why in found.skipped:
        say(f"not tried: {name}: {why}")
