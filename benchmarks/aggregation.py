"""Aggregation rules: time relative to the plain mean, error against float64, and ByzFL beside both.

    python benchmarks/aggregation.py                                   # n = 30, f = 3, d = 2.5e6 and 1e7
    pip install --no-deps --target peer byzfl==0.0.11                  # for the benchmark only
    python benchmarks/aggregation.py --peer-path peer
    python benchmarks/aggregation.py --streams 30x1e8,100x1e7,500x1e6 --rules caf,cwmed
    python benchmarks/aggregation.py --device cuda -n 100 -f 10 -d 1e7

Times are ratios to `X.mean(0)` in the same run; `at most` are the bars that the rules are held to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rule_costs
from tables import Cells, table
from trilemma.base.errors import UserError

SHORT = {"clients": "-n", "byzantine": "-f", "dims": "-d"}
"""Options that have a letter."""


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to measure: rules on (clients, dims) messages, errors at `error_dim` (0: none), streams n×d."""

    rules: str = ""
    clients: int = 30
    byzantine: int = 3
    dims: str = "2.5e6,1e7"
    device: str = "cpu"
    repeats: int = 5
    peer_path: Path | None = None
    error_dim: int = 100_000
    streams: str = ""
    out: Path | None = None


def report(plan: BenchmarkPlan) -> Iterator[str]:
    """Measure and yield lines of Markdown; write the numbers to `plan.out` as JSON at the end."""
    if plan.device not in ("cpu", "cuda") or (plan.device == "cuda" and not torch.cuda.is_available()):
        raise UserError(
            f"device {plan.device!r} is not available here; allowed: cpu, cuda where there is one"
        )
    barred = rule_costs.CUDA_BARS if plan.device == "cuda" else rule_costs.RATIO_BARS
    names = plan.rules.split(",") if plan.rules else list(barred)
    dims, sizes = list(_numbers(plan.dims)), [_size(text) for text in filter(None, plan.streams.split(","))]
    peer = rule_costs.load_peer(plan.peer_path) if plan.peer_path else None
    n, f, device = plan.clients, plan.byzantine, plan.device
    record: dict[str, list[Any]] = {}
    yield f"{_machine(device)}; best of {plan.repeats}; ratios to X.mean(0) on the same X, taken in turns"
    for d in dims:
        title = f"n = {n}, f = {f}, d = {d:.3g}"
        rows = rule_costs.timings(names, n, f, d, device=device, repeats=plan.repeats, peer=peer)
        yield from _table(title, rows, lambda row: _timing(row, device), record)
    if plan.error_dim:
        title = f"error / honest spread, n = {n}, f = {f}, d = {plan.error_dim:.3g}"
        found = rule_costs.errors(names, n, f, plan.error_dim, device=device, peer=peer)
        yield from _table(title, found, _error, record)
    if sizes:
        yield from _table("streamed", rule_costs.streamed(names, sizes, f, chunk=1 << 16), _streamed, record)
    if plan.out is not None:
        numbers = {title: [dataclasses.asdict(row) for row in rows] for title, rows in record.items()}
        plan.out.write_text(json.dumps(numbers, indent=1))


def _table(
    title: str, rows: Iterable[Any], cells: Callable[[Any], Cells], record: dict[str, list[Any]]
) -> Iterator[str]:
    """Yield a table line by line, as its rows are measured."""
    record[title] = []
    yield f"\n**{title}**\n"
    yield from table(record[title].append(row) or cells(row) for row in rows)


def _timing(row: rule_costs.Timing, device: str) -> Cells:
    measured, bar = (row.seconds, "{:.0f} ms") if device == "cuda" else (row.ratio, "{:g}")
    scaled = None if row.bar is None else row.bar * 1e3 if device == "cuda" else row.bar
    return (
        ("rule", row.rule),
        ("ms", f"{row.seconds * 1e3:.2f}"),
        ("× mean", f"{row.ratio:.2f}"),
        ("processor time × mean", "–" if device == "cuda" else f"{row.busy_ratio:.2f}"),
        ("at most", "–" if scaled is None else bar.format(scaled)),
        (
            "",
            "" if row.bar is None else "holds" if measured <= row.bar else f"{measured / row.bar:.2f} of it",
        ),
        ("extra memory", "–" if row.extra is None else f"{100 * row.extra:.1f} %"),
        ("ByzFL × mean", _number(row.peer_ratio, "{:.0f}", "no memory")),
    )


def _error(row: rule_costs.Error) -> Cells:
    theirs = _number(row.peer_error, "{:.1e}", "no answer")
    return (("rule", row.rule), ("messages", row.case), ("error", f"{row.error:.1e}"), ("ByzFL", theirs))


def _streamed(row: rule_costs.Streamed) -> Cells:
    return (
        ("rule", row.rule),
        ("n", str(row.n)),
        ("d", f"{row.d:.0e}"),
        ("seconds", f"{row.seconds:.2f}"),
        ("s per 10⁹ numbers", f"{row.per_billion:.2f}"),
    )


def _number(value: float | None, form: str, infinite: str) -> str:
    if value is None:
        return "–"
    return infinite if value == math.inf else form.format(value)


def _machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        try:
            yield int(float(part))
        except ValueError:
            raise UserError(f"{part!r} is not a number of coordinates; write them as in 2.5e6,1e7") from None


def _size(text: str) -> tuple[int, int]:
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != 2:
        raise UserError(f"{text!r} is not a size; write n x d as in 30x1e8")
    n, d = _numbers(",".join(parts))
    return n, d


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for field in dataclasses.fields(BenchmarkPlan):
        kind = Path if field.default is None else type(field.default)
        names = [f"--{field.name.replace('_', '-')}", *filter(None, [SHORT.get(field.name)])]
        parser.add_argument(*names, type=kind, default=field.default)
    try:
        for line in report(BenchmarkPlan(**vars(parser.parse_args()))):
            print(line, flush=True)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
