"""`trilemma export`: the trained model as a file other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilemma.cli.options import PluginOption
from trilemma.cli.saying import note, say


def export_command(
    source: Annotated[Path, typer.Argument(help="the folder of a run, or of a federation")],
    target: Annotated[Path, typer.Argument(help="a new file: model.safetensors, or model.pt")],
    seed: Annotated[int | None, typer.Option(help="which seed's model; default: the first")] = None,
    run: Annotated[str | None, typer.Option(help="which of a federation's runs, if it has several")] = None,
    client: Annotated[int | None, typer.Option(help="whose model, where clients keep their own")] = None,
    plugin: PluginOption = None,
) -> None:
    """Write the trained model under its own names: a module's state_dict, as safetensors or .pt.

    A model that was trained on features gets a file beside it that says how to compute them.
    """
    from trilemma import plugins, report
    from trilemma.report.export import export

    plugins.load(plugin or ())  # beside those that the folder recorded
    result = report.load(source, run)
    state, caveat = result.state_dict(seed, client), result.caveat
    beside = export(state, target, result.inputs(seed))
    count = sum(tensor.numel() for tensor in state.values())
    say(f"{target}: {len(state)} tensors, {count:,} numbers")
    if beside is not None:
        say(
            f"{beside}: what the model takes in place of examples; trilemma.inputs({str(beside)!r})(examples)"
        )
    if caveat:
        note(f"note: {caveat}")
