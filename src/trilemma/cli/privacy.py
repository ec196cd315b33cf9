"""`trilemma privacy` and `trilemma bounds`: what noise guarantees, what liars can do in spite of rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from trilemma import aggregation
from trilemma.base import plugins
from trilemma.base.errors import UserError
from trilemma.cli.options import AsJson, Byzantine, Clients, PluginOption, SigmaCor, SigmaInd
from trilemma.learning.defences.evidence import hidden_shift
from trilemma.privacy import NoiseLaw, mean_noise
from trilemma.privacy.accounting import calculator
from trilemma.report.bounds import bounds_tables, defined_rules
from trilemma.report.picture_files import check_picture
from trilemma.report.plain import plain_json
from trilemma.report.privacy import plot_privacy, privacy_tables
from trilemma.report.privacy_question import Question


def privacy_command(
    clients: Clients,
    rounds: Annotated[int, typer.Option(help="number of releases of each client")],
    threat: Annotated[str, typer.Option(help="cdp, secldp, byzldp or ldp")] = "secldp",
    byzantine: Byzantine = 0,
    collusion: Annotated[int | None, typer.Option("-q", "--collusion", help="how many also collude")] = None,
    neighbours: Annotated[
        int | None, typer.Option("-k", "--neighbours", help="others each shares secrets with; default: all")
    ] = None,
    weights: Annotated[str, typer.Option(help="public weights of the clients, as in 29,29,20,12")] = "",
    clip: Annotated[float, typer.Option(help="bound on what a unit contributes")] = 1.0,
    sigma_ind: SigmaInd = None,
    sigma_cor: SigmaCor = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="instead of sigmas: own noise over a replacement's move")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="instead of sigmas: find the least noise")] = None,
    delta: Annotated[float | None, typer.Option(help="left out with sigmas and --epsilon: find it")] = None,
    unit: Annotated[str, typer.Option(help="who is protected: user or example")] = "user",
    batch: Annotated[int, typer.Option(help="examples averaged in a message")] = 1,
    examples: Annotated[
        int | None, typer.Option(help="examples a client holds, for the sampling rate")
    ] = None,
    sampling: Annotated[str, typer.Option(help="none, poisson or without-replacement")] = "none",
    adjacency: Annotated[str, typer.Option(help="replace, add-remove or published")] = "replace",
    assume: Annotated[
        str, typer.Option(help="guaranteed, or published: holds only if liars exist")
    ] = "guaranteed",
    accountant: Annotated[str | None, typer.Option(help="calibrate by it: trilemma list accountants")] = None,
    dim: Annotated[int, typer.Option("-d", "--dim", help="parameters, to scale the predicted error")] = 1,
    plot: Annotated[Path | None, typer.Option(help="also draw a picture into this file")] = None,
    plugin: PluginOption = None,
    as_json: AsJson = False,
) -> None:
    """Compute what a noise guarantees, or the noise a guarantee needs.

    Give two of ε, δ and the noise to get the third:

    trilemma privacy -n 100 -f 10 --clip 2.25 --rounds 30 --sigma-ind 1.2 --sigma-cor 0.65 --delta 1e-4
    """
    plugins.load(plugin or ())
    question = Question(
        clients=clients,
        rounds=rounds,
        threat=threat,
        byzantine=byzantine,
        collusion=collusion,
        neighbours=neighbours,
        weights=weights,
        clip=clip,
        sigma_ind=sigma_ind,
        sigma_cor=sigma_cor,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        unit=unit,
        batch=batch,
        examples=examples,
        sampling=sampling,
        adjacency=adjacency,
        assume=assume,
        accountant=accountant,
        dim=dim,
    )
    if plot is not None:
        if delta is None:
            raise UserError("--plot draws epsilon over the rounds: give --delta")
        check_picture(plot)  # said before anything is computed
    found, record = question.finding, question.record()
    remarks = [f"note: {note}" for note in record["notes"]]
    if "no_guarantee" in record:
        remarks.insert(0, f"no guarantee: {record['no_guarantee']}")
    if plot is not None and delta is not None:
        drawn = plot_privacy(calculator.picture(found.release, found.threat, rounds, delta), plot)
        record["plot"] = str(drawn)
        remarks.append(f"picture: {drawn}")
    print_record(record, privacy_tables(record), remarks, as_json)


def bounds_command(
    clients: Clients,
    byzantine: Byzantine = 0,
    rule: Annotated[list[str] | None, typer.Option(help="repeatable; default: every rule")] = None,
    sigma_ind: SigmaInd = None,
    sigma_cor: SigmaCor = None,
    plugin: PluginOption = None,
    hidden: Annotated[bool, typer.Option("--hidden", help="what f liars can hide in the noise")] = False,
    dim: Annotated[int, typer.Option("-d", "--dim", help="for --hidden: number of parameters")] = 0,
    rounds: Annotated[int, typer.Option(help="for --hidden: number of rounds T")] = 0,
    clip: Annotated[float, typer.Option(help="for --hidden: bound C on a contribution")] = 1.0,
    alarm: Annotated[float, typer.Option(help="for --hidden: probability of a false alarm")] = 1e-6,
    neighbours: Annotated[
        int | None,
        typer.Option(
            "-k", "--neighbours", min=1, help="for --hidden: others each shares secrets with; default: all"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute how far liars can move each rule, and what they can hide in the noise.

    trilemma bounds -n 100 -f 10 -d 1290 --rounds 30 --sigma-ind 1.19 --sigma-cor 0.64 --hidden --clip 2.25
    """
    plugins.load(plugin or ())
    if not 0 <= 2 * byzantine < clients:
        raise UserError(f"nothing is promised unless 0 ≤ 2f < n, got n = {clients}, f = {byzantine}")
    if neighbours is not None and not hidden:
        raise UserError("-k, with how many others each shares secrets, goes with --hidden")
    law = NoiseLaw(sigma_ind or 0.0, sigma_cor or 0.0)
    rules = [aggregation.parse(text, byzantine) for text in rule or defined_rules(clients, byzantine)]
    record: dict[str, Any] = {
        "mean_noise": mean_noise(law, clients, byzantine, neighbours),
        "rules": [
            {"rule": one.name, "kappa": one.kappa(clients), "criterion": one.criterion} for one in rules
        ],
    }
    if hidden:
        found = hidden_shift(law, clip, clients, byzantine, dim, rounds, alarm, neighbours)
        record["hidden"] = {**asdict(found), "shift": found.shift}
    print_record(record, bounds_tables(record), (), as_json)


def print_record(
    record: dict[str, Any], tables: Iterable[Table], remarks: Sequence[str], as_json: bool
) -> None:
    """Print what was found: tables and remarks, or one JSON object."""
    if as_json:
        print(plain_json(record))
        return
    console = Console()
    for table in tables:
        console.print(table, end="\n\n")
    for remark in remarks:
        console.print(remark, highlight=False, markup=False)
