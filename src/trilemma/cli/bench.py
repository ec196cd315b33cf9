"""`trilemma bench`: what things cost on this machine, beside their peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trilemma.aggregation.benchmark_report import Plan, report

bench_app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@bench_app.callback()
def bench() -> None:
    """Measure speed and exactness on this machine."""


@bench_app.command("aggregation")
def aggregation_command(
    rules: Annotated[str, typer.Option(help="names joined by commas; default: all with a bar")] = "",
    clients: Annotated[int, typer.Option("--clients", "-n", help="messages")] = 30,
    byzantine: Annotated[int, typer.Option("--byzantine", "-f", help="how many may be Byzantine")] = 3,
    dims: Annotated[str, typer.Option("--dims", "-d", help="coordinates, joined by commas")] = "2.5e6,1e7",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    repeats: Annotated[int, typer.Option(help="timings, of which the best counts")] = 5,
    peer_path: Annotated[
        Path | None, typer.Option(help="folder of `pip install --no-deps --target FOLDER byzfl==0.0.11`")
    ] = None,
    error_dim: Annotated[int, typer.Option(help="coordinates for the errors; 0: leave them out")] = 100_000,
    streams: Annotated[str, typer.Option(help="sizes to stream, n x d, as in 30x1e8,500x1e6")] = "",
    out: Annotated[Path | None, typer.Option(help="write the numbers here, as JSON")] = None,
) -> None:
    """Time the aggregation rules relative to the plain mean, and compare their answers with float64."""
    plan = Plan(
        rules,
        clients,
        byzantine,
        dims,
        device,
        repeats,
        peer_path,
        error_dim=error_dim,
        streams=streams,
        out=out,
    )
    for line in report(plan):
        typer.echo(line)
