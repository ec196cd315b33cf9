"""How a round grows with clients n and parameters d, and what that makes of a thousand clients and 10⁸.

    python benchmarks/federation_growth.py [--clients 4 8 16] [--dims 50000 200000 800000] [--neighbours 4]

Whole federations in one process (keys, ledgers, journals, commits, disks; no network), CafCor with pairwise
noise. Each stage's seconds, a client's and the server's, are fitted by what the stage does: a constant, d,
and d times the number of streams (noise), of messages, or of pairs of messages (the rule's Gram matrix). The
last lines extrapolate the fit. `--large N D` aggregates N messages of D numbers from a file, and says what
memory that took beside the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import nnls

from trilemma import config as configurations
from trilemma import mapped
from trilemma.aggregation import parse, stream
from trilemma.federation import provisioning
from trilemma.federation.commits import CommitLog
from trilemma.federation.inprocess import InProcess
from trilemma.federation.layout import Federation, Timing
from trilemma.federation.server import open_run
from trilemma.federation.spending import write_budgets
from trilemma.federation.task import load_task
from trilemma.learning.server import column_blocks

TASK = """
import numpy as np
from trilemma import models

def model():
    return models.build("mlp", (62,), 2, hidden=({hidden},))

def data(client):
    x = np.random.default_rng(client).normal(size=(60, 62))
    return x, (x[:, 0] > 0).astype(int)
"""
ROUNDS = 3
CLIENT, SERVER = ("noise", "compute", "journal", "serialise", "ledger"), ("admit", "aggregate", "commit")
Shape = Callable[[float, float, float], list[float]]
GROWS: dict[str, Shape] = {
    "noise": lambda n, k, d: [1.0, d, k * d],
    "compute": lambda n, k, d: [1.0, d],
    "journal": lambda n, k, d: [1.0, d],
    "serialise": lambda n, k, d: [1.0, d],
    "ledger": lambda n, k, d: [1.0],
    "admit": lambda n, k, d: [1.0, d, n * d],
    "aggregate": lambda n, k, d: [1.0, n * d, n * n * d],
    "commit": lambda n, k, d: [1.0, n * d],
}
"""What each stage's seconds are made of; k is with how many others a client shares secrets."""


def measure(clients: int, dim: int, neighbours: int | None) -> tuple[int, dict[str, float]]:
    """Return the exact number of parameters and the median seconds of each stage."""
    privacy = {"threat": "secldp", "clip": 0.1, "sigma_cor": 0.5, "sigma_ind": 0.1}
    tables = {
        "federation": {"clients": clients, "tolerate": 1},
        "algorithm": {"name": "cafcor"},
        "aggregation": {"rule": "caf"},
        "privacy": privacy if neighbours is None else {**privacy, "neighbours": neighbours},
        "run": {"rounds": ROUNDS, "evaluate_every": ROUNDS},
    }
    with tempfile.TemporaryDirectory() as scratch:
        task, folder = Path(scratch) / "task.py", Path(scratch) / "federation"
        task.write_text(TASK.format(hidden=max(1, dim // 65)))
        facts = Federation("growth", clients, examples=60, timing=Timing(round_limit=600.0, poll=0.01))
        made = provisioning.init(folder, facts, configurations.parse(tables, []).toml(), task=task)
        loaded = load_task(made[0])
        write_budgets(made[1:], loaded, 1e9)
        open_run(made[0], "growth", InProcess(made)).go()
        notes = [
            json.loads(line)["seconds"]
            for path in folder.glob("client-*/state/runs/growth/notes.jsonl")
            for line in path.read_text().splitlines()[1:]
        ]
        records = [one["seconds"] for one in CommitLog(made[0].run_folder("growth")).records()[1:]]
        found = {stage: statistics.median(one[stage] for one in notes) for stage in CLIENT}
        found |= {stage: statistics.median(one[stage] for one in records) for stage in SERVER}
        return loaded.model.dim, found


def growth(clients: list[int], dims: list[int], neighbours: int) -> None:
    """Measure, fit and extrapolate."""
    rows = []
    for n in clients:
        for d in dims:
            for k in {None, neighbours} if n == max(clients) else {None}:
                exact, found = measure(n, d, k)
                rows.append((n, n - 1 if k is None else k, exact, found))
                told = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in found.items())
                print(f"n = {n}, k = {rows[-1][1]}, d = {exact:,}: {told}", flush=True)
    fits = {}
    for stage, shape in GROWS.items():
        factors = np.array([shape(n, k, d) for n, k, d, _ in rows])
        seconds = np.array([found[stage] for *_, found in rows])
        weights = 1 / np.maximum(seconds, 1e-3)  # relative errors count
        scale = factors.max(axis=0)
        solved, _ = nnls(factors / scale * weights[:, None], seconds * weights)
        fits[stage] = solved / scale
        errors = np.abs(factors @ fits[stage] - seconds) / np.maximum(seconds, 1e-3)
        print(
            f"{stage}: {', '.join(f'{one:.2e}' for one in fits[stage])}; median error {np.median(errors):.0%}"
        )
    for n, k, d in ((1000, 999, 1e8), (1000, 32, 1e8), (1000, 32, 431_972), (20, 19, 1e8)):
        told = {stage: float(np.dot(fits[stage], shape(n, k, d))) for stage, shape in GROWS.items()}
        client, server = (sum(told[one] for one in stages) for stages in (CLIENT, SERVER))
        each = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in told.items())
        print(
            f"expected at n = {n}, k = {k}, d = {d:.3g}: client {client:.0f} s, server {server:.0f} s "
            f"({each})"
        )


def large(clients: int, dim: int) -> None:
    """Aggregate messages that lie in a file; say how long it took, and in how much memory of its own."""
    rule = parse("caf", f=clients // 5)
    stream(rule, [torch.randn(clients, 1 << 16)] * 2)
    before = _own_memory()
    with tempfile.TemporaryDirectory() as scratch:
        X = mapped.empty(Path(scratch), (clients, dim), torch.float32)
        for place, row in enumerate(X):
            for start in range(0, dim, 1 << 22):
                part = row[start : start + (1 << 22)]
                part.copy_(torch.randn(len(part), generator=torch.Generator().manual_seed(place)))
        began, most = time.monotonic(), before

        def watched() -> object:
            nonlocal most
            for block in column_blocks(X):
                most = max(most, _own_memory())
                yield block

        stream(rule, watched)
        seconds, size = time.monotonic() - began, 4 * clients * dim / 1e9
        print(
            f"{clients} x {dim:,}: {size:.1f} GB in a file, {seconds:.1f} s, "
            f"{(most - before) / 1e9:.2f} GB of memory"
        )


def _own_memory() -> int:
    """Return the bytes this process has that are not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--dims", type=int, nargs="+", default=[50_000, 200_000, 800_000])
    parser.add_argument("--neighbours", type=int, default=4)
    parser.add_argument("--large", type=int, nargs=2, metavar=("N", "D"))
    options = parser.parse_args()
    if options.large:
        large(*options.large)
    else:
        growth(options.clients, options.dims, options.neighbours)


if __name__ == "__main__":
    main()
