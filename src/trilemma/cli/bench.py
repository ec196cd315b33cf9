"""`trilemma bench`: what things cost here, beside their peers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from trilemma.aggregation import benchmark
from trilemma.errors import UserError

bench_app = typer.Typer(
    help="Measure speed and exactness on this machine.", no_args_is_help=True, pretty_exceptions_enable=False
)


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
    streams: Annotated[str, typer.Option(help="sizes n×d to stream, as in 30x1e8,500x1e6")] = "",
    out: Annotated[Path | None, typer.Option(help="write the numbers here, as JSON")] = None,
) -> None:
    """Time the aggregation rules relative to the plain mean, and compare their answers with float64."""
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"device {device!r} is not available here; allowed: cpu, cuda where there is one")
    names = rules.split(",") if rules else list(benchmark.RATIO_BARS)
    peer = benchmark.load_peer(peer_path) if peer_path else None
    console = Console()
    console.print(f"{_machine(device)}; times are the best of {repeats}, ratios to X.mean(0) on the same X")
    record: dict[str, list[Any]] = {}
    for dim in _numbers(dims):
        found = benchmark.timings(names, clients, byzantine, dim, device=device, repeats=repeats, peer=peer)
        title = f"n = {clients}, f = {byzantine}, d = {dim:.3g}"
        record[title] = _print(console, title, found, _timing_row, device)
    if error_dim:
        found_errors = benchmark.errors(names, clients, byzantine, error_dim, device=device, peer=peer)
        title = f"error / honest spread, n = {clients}, d = {error_dim:.3g}"
        record[title] = _print(console, title, found_errors, _error_row, device)
    if streams:
        sizes = [_size(text) for text in streams.split(",")]
        found_streams = benchmark.streamed(names, sizes, byzantine, chunk=1 << 16)
        record["streamed"] = _print(console, "streamed", found_streams, _stream_row, device)
    if out is not None:
        out.write_text(
            json.dumps({k: [dataclasses.asdict(r) for r in v] for k, v in record.items()}, indent=1)
        )


Cells = tuple[tuple[str, str], ...]


def _print(console: Console, title: str, rows: Iterable[Any], cells: Any, device: str) -> list[Any]:
    """Print rows as they come in, under one heading."""
    table, kept = Table(title=title, title_justify="left"), []
    for row in rows:
        kept.append(row)
        pairs: Cells = cells(row, device)
        if not table.columns:
            for heading, _ in pairs:
                table.add_column(heading, justify="left" if heading in ("rule", "case") else "right")
        table.add_row(*(cell for _, cell in pairs))
    console.print(table)
    return kept


def _timing_row(row: benchmark.Timing, device: str) -> Cells:
    within = "" if row.bar is None else _verdict(row.seconds if device == "cuda" else row.ratio, row.bar)
    bar = "–" if row.bar is None else f"{row.bar * 1e3:.0f} ms" if device == "cuda" else f"{row.bar:g}"
    return (
        ("rule", row.rule),
        ("ms", f"{row.seconds * 1e3:.2f}"),
        ("× mean", f"{row.ratio:.2f}"),
        ("bar", bar),
        ("", within),
        ("extra memory", "–" if row.extra is None else f"{100 * row.extra:.1f} %"),
        ("ByzFL × mean", _peer_ratio(row.peer_ratio)),
    )


def _peer_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return "no memory" if ratio == math.inf else f"{ratio:.0f}"


def _verdict(value: float, bar: float) -> str:
    return "holds" if value <= bar else f"{value / bar:.2f} of it"


def _error_row(row: benchmark.Error, device: str) -> Cells:
    theirs = "–" if row.peer_error is None else f"{row.peer_error:.1e}"
    theirs = "no answer" if row.peer_error == math.inf else theirs
    return (("rule", row.rule), ("case", row.case), ("error", f"{row.error:.1e}"), ("ByzFL", theirs))


def _stream_row(row: benchmark.Streamed, device: str) -> Cells:
    return (
        ("rule", row.rule),
        ("n", str(row.n)),
        ("d", f"{row.d:.0e}"),
        ("seconds", f"{row.seconds:.2f}"),
        ("s per 10⁹ numbers", f"{row.per_billion:.2f}"),
    )


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} threads"


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        try:
            yield int(float(part))
        except ValueError:
            raise UserError(f"{part!r} is not a number of coordinates; write them as in 2.5e6,1e7") from None


def _size(text: str) -> tuple[int, int]:
    parts: Sequence[str] = text.lower().replace("×", "x").split("x")
    if len(parts) != 2:
        raise UserError(f"{text!r} is not a size; write n x d as in 30x1e8")
    n, d = _numbers(",".join(parts))
    return n, d
