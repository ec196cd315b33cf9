"""`trilemma export`: the trained model as a file other programs read, or where a client goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trilemma.base.errors import UserError
from trilemma.cli.options import PluginOption
from trilemma.cli.output import note, say

if TYPE_CHECKING:
    from torch import Tensor

    from trilemma.experiment import Inputs
    from trilemma.federation.client.at_home import AtHome, Scores
    from trilemma.federation.party.layout import Party

PRIVATE = (
    "this model is for you alone: it learnt from your own examples without noise, and no ε covers it. Do not "
    "send it, or what it answers, to anybody who may not see these examples"
)
OPTIMISTIC = (
    "held-out scores are a little too good: the model of all learnt from these examples too, and how far to "
    "go was chosen by them"
)


def export_command(
    source: Annotated[Path, typer.Argument(help="the folder of a run, of a federation, or of one client")],
    target: Annotated[Path, typer.Argument(help="a new file: model.safetensors, or model.pt")],
    seed: Annotated[int | None, typer.Option(help="seed of the model; default: the first")] = None,
    run: Annotated[str | None, typer.Option(help="which of a federation's runs, if it has several")] = None,
    client: Annotated[int | None, typer.Option(help="whose model, where clients keep their own")] = None,
    at_home: Annotated[
        bool | None,
        typer.Option(
            "--at-home/--as-received",
            help="from a client's folder: go on on its own examples first, or not; default: as "
            "[aggregation] tune says",
            show_default=False,
        ),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option(help="the approved evidence pack, where [federation] export asks for one")
    ] = None,
    plugin: PluginOption = None,
) -> None:
    """Write a trained model to a file, as its state_dict.

    A model that was trained on features gets a file beside it that says how to compute them.

    From a client's own folder in a federation, --at-home trains the federation's model further on that
    client's examples, as long as these say that it helps. Nothing is sent.
    """
    from trilemma import report
    from trilemma.base import plugins
    from trilemma.federation.client import at_home as homes

    plugins.load(plugin or ())  # beside those that the folder recorded
    party = homes.client_in(source)
    if party is not None:
        if seed is not None or client is not None:
            raise UserError(
                f"{source} is one client's folder and has one model: leave out --seed and --client"
            )
        _export_own(party, run, target, at_home, pack)
        return
    if at_home is not None:
        raise UserError(
            f"{source}: --at-home and --as-received are for one client's folder of a federation, as in "
            "hospitals/client-0; clients of a simulation go on at home with [aggregation] tune = 'clients'"
        )
    result = report.load(source, run)
    if (rule := result.config.federation.export) is not None:
        _check_approved(source, rule.needs, pack, result.params())
    _write(result.state_dict(seed, client), target, result.inputs(seed))
    if caveat := result.caveat:
        note(f"note: {caveat}")


def _check_approved(source: Path, needs: int, pack: Path | None, params: Tensor) -> None:
    """Refuse to export a federation's model that too few owners have approved; a simulation asks nobody."""
    from trilemma.evidence.approvals import check_export
    from trilemma.evidence.gather import digest_of, server_of

    party = server_of(source)
    if party is not None:
        check_export(party, needs, pack, digest_of(params))


def _export_own(party: Party, run: str | None, target: Path, at_home: bool | None, pack: Path | None) -> None:
    """Write what a client has of a run: the model of all, or where it goes on to from there."""
    from trilemma import models
    from trilemma.experiment import Inputs
    from trilemma.federation.client.at_home import received
    from trilemma.report.export import check_target
    from trilemma.report.loading import about_statistics

    check_target(target)  # before minutes are spent on what it is for
    has = received(party, run)
    config, model = has.task.config, has.task.model
    if config.federation.export is not None:
        from trilemma.evidence.approvals import check_export
        from trilemma.evidence.gather import digest_of

        check_export(party, config.federation.export.needs, pack, digest_of(has.params))
    wanted = config.aggregation.tune != "no" if at_home is None else at_home
    if wanted:
        note("at home: 25 ways to go on are tried on your own examples, each five times")
    home = has.at_home() if wanted else None
    params = has.params if home is None else home.found.params
    _write(models.state_dict(model, params), target, Inputs(config, config.run.seeds[0]))
    if home is not None:
        _say_home(home, has.run)
    for caveat in (about_statistics(model), config.holding.caveat, "" if home is None else PRIVATE):
        if caveat:
            note(f"note: {caveat}")


def _say_home(home: AtHome, run: str) -> None:
    """Say how far a client went from the model of all, and what its own examples say of both."""
    if home.found.scale:
        said = f"it goes on from {home.found.scale:g} times what run {run!r} taught"
    else:
        said = f"what run {run!r} taught is left aside: these examples alone do better"
    say(f"at home, on {home.examples} own examples: {said}, pulled back there by {home.found.pull:g}")
    _say_scores("held out, each example once", home.before, home.after)
    _say_scores("test examples", *home.tested)
    note(f"note: {OPTIMISTIC}")


def _say_scores(where: str, before: Scores, after: Scores) -> None:
    both = [f"{name} {before[name]:.3f} before, {after[name]:.3f} after" for name in before]
    if both:
        say(f"{where}: {'; '.join(both)}")


def _write(state: Mapping[str, Tensor], target: Path, inputs: Inputs) -> None:
    """Write the tensors, and say what is where."""
    from trilemma.report.export import export

    beside = export(state, target, inputs)
    count = sum(tensor.numel() for tensor in state.values())
    say(f"{target}: {len(state)} tensors, {count:,} numbers")
    if beside is not None:
        say(
            f"{beside}: what the model takes in place of examples; trilemma.inputs({str(beside)!r})(examples)"
        )
