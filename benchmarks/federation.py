"""Seconds per round of a real federation on loopback, by stage; its processes, and what they weigh.

    python benchmarks/federation.py [--clients 5 20] [--rounds 6] [--sizes 431972 10009022]

Starts real federations (mutual TLS, a process for each party, CafCor with pairwise noise) and reads the stage
times that server and clients write down. Parties share this machine's cores: a client's stage is the slowest
client's. `carrier` is what the server waited and no client worked. A client's memory is what it shares with
others divided among all (PSS), when it waits and when it has worked. Seconds say little where others use the
machine too, so its load average is printed first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from trilemma import config as configurations
from trilemma.federation.client.spending import write_budgets
from trilemma.federation.operations import deployment
from trilemma.federation.party import layout, provisioning
from trilemma.federation.party.addresses import free_port
from trilemma.federation.party.public_facts import Federation, Timing
from trilemma.federation.party.task import load_task
from trilemma.federation.processes import door
from trilemma.federation.processes import groups as processes
from trilemma.federation.server.commits import CommitLog

FEATURES = 64
HIDDEN = {431_972: (610, 640), 10_009_022: (3120, 3140)}
TASK = """
import numpy as np
from trilemma import Declaration, Values, models

expects = Declaration(Values("numbers", ({features},), low=-10, high=10), Values("whole", low=0, high=1))

def model():
    return models.build("mlp", ({features},), 2, hidden={hidden})

def data(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=(200, {features}))
    return x, (x[:, 0] > 0).astype(int)
"""


def made(folder: Path, clients: int, size: int, rounds: int) -> list[layout.Party]:
    """Make a federation's folders."""
    tables = {
        "federation": {"clients": clients, "tolerate": 1},
        "algorithm": {"name": "cafcor"},
        "aggregation": {"rule": "caf"},
        "privacy": {"threat": "secldp", "clip": 0.1, "sigma_cor": 0.5, "sigma_ind": 0.1},
        "run": {"rounds": rounds},
    }
    task = folder.with_name("task.py")
    task.write_text(TASK.format(features=FEATURES, hidden=HIDDEN[size]))
    timing = Timing(round_limit=300.0, join_limit=120.0)
    port = free_port("127.0.0.1", 23000 + os.getpid() % 20000)
    facts = Federation("bench", clients, port=port, examples=200, timing=timing)
    parties = provisioning.init(folder, facts, configurations.parse(tables, []).toml(), task=task)
    write_budgets(parties[1:], load_task(parties[0]), 1e9)
    return parties


def weight(parties: list[layout.Party]) -> float:
    """Return a client's megabytes."""
    found = [psutil.Process(one.pid) for party in parties[1:] for one in processes.recorded(party.running)]
    return statistics.mean(one.memory_full_info().pss for one in found) / 1e6


def measure(clients: int, size: int, rounds: int) -> dict[str, float]:
    """Return median seconds per round and stage, and the rest."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "federation"
        parties = made(folder, clients, size, rounds)
        try:
            began = time.monotonic()
            deployment.up(folder)
            figures = {"start": time.monotonic() - began, "MB waits": weight(parties)}
            *_, end = door.follow(parties[0], "bench", False, print, float("inf"))
            assert end["state"] == "completed", end
            figures |= {"processes": _processes(parties), "MB worked": weight(parties)}
            return figures | _stages(folder, parties)
        finally:
            deployment.down(folder)


def _processes(parties: list[layout.Party]) -> float:
    return float(sum(len(processes.members(one)) for p in parties for one in processes.recorded(p.running)))


def _stages(folder: Path, parties: list[layout.Party]) -> dict[str, float]:
    # The first round loads data and compiles kernels; it is not what a round costs.
    records = CommitLog(parties[0].run_folder("bench")).records()[1:]
    notes = [
        [json.loads(line)["seconds"] for line in path.read_text().splitlines()][1:]
        for path in folder.glob("client-*/state/runs/bench/notes.jsonl")
    ]
    rounds = []
    for index, record in enumerate(records):
        server, own = record["seconds"], [note[index] for note in notes]
        slowest = {stage: max(one[stage] for one in own) for stage in own[0]}
        carried = server["exchange"] - max(sum(one.values()) for one in own)
        rest = {stage: server[stage] for stage in ("admit", "aggregate", "commit")}
        rounds.append(
            {**slowest, **rest, "carrier": carried, "round": server["exchange"] + sum(rest.values())}
        )
    return {stage: statistics.median(one[stage] for one in rounds) for stage in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[5])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(HIDDEN), choices=list(HIDDEN))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a federation is taken down all the same
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    every = [(clients, size) for clients in options.clients for size in options.sizes]
    found = {one: measure(*one, options.rounds) for one in every}
    table = Table("", *(f"{clients} clients\n{size:,}" for clients, size in every))
    for name in next(iter(found.values())):
        table.add_row(name, *(f"{figures[name]:.3f}" for figures in found.values()))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
