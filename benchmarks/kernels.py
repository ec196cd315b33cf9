"""Every hand-written kernel against plain torch, on work that users do: does it earn its keep?

    python benchmarks/kernels.py [--device cpu] [--json FILE]
    python benchmarks/kernels.py --device cuda --json FILE
    python benchmarks/kernels.py --only messages --clients 30 --dims 79510

One row per kernel and size: the best time of ours, that of the best plain version, their ratio, and how far
the answers differ. Versions take turns in one process, the best of several counts. A kernel that gains less
than 1.3 on the device it is for should not be there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import kernel_layers
import kernel_messages
from kernel_cases import KernelCase, KernelRow, failed, measure
from tables import table


def cases(options: argparse.Namespace) -> Iterator[KernelCase]:
    """Yield what is asked for."""
    device = options.device
    if options.only != "messages":
        together = options.together or (100 if device == "cuda" else 4)
        yield from kernel_layers.cases(device, together, options.batch)
    if options.only != "layers":
        dims = options.dims or [79_510, 431_080, 2_500_000, *([10_000_000] if device == "cuda" else [])]
        yield from kernel_messages.cases(device, options.clients, dims)


def measured(options: argparse.Namespace) -> Iterator[KernelRow]:
    """Yield row after row, as long as there is time."""
    end = time.perf_counter() + options.limit
    for case in cases(options):
        if time.perf_counter() > end:
            print("out of time", file=sys.stderr)
            return
        if options.kernel not in case.kernel:
            continue
        try:
            yield measure(case, options.device, options.repeats, options.patience)
        except Exception as error:  # one kernel that does not run must not hide the others' figures
            yield failed(case, error)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", choices=["messages", "layers"], default="")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--clients", type=int, nargs="+", default=[30, 100], help="messages")
    parser.add_argument("--dims", type=int, nargs="+", default=[], help="coordinates of messages")
    parser.add_argument("--together", type=int, default=0, help="clients that go through a layer at once")
    parser.add_argument("--batch", type=int, default=50, help="examples of each")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--patience", type=float, default=1.0, help="seconds per row before the last round")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all rows together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("highest")
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{options.threads} threads"
    print(f"torch {torch.__version__}, {where}; best of up to {options.repeats}, in turns\n")
    rows: list[KernelRow] = []
    try:
        for line in table(rows.append(row) or row.cells() for row in measured(options)):
            print(line, flush=True)
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    if not all(row.right for row in rows):
        sys.exit("some answers are wrong")


if __name__ == "__main__":
    main()
