"""Seconds per round of a real federation on loopback, by stage.

    python benchmarks/federation.py [--clients 5] [--rounds 6] [--sizes 431972 10009022] [--polls 0.2 3.0]

Starts real federations (TLS, node authentication, CafCor with pairwise noise) and reads the stage times that
server and clients write down. Parties share this machine's cores, so client stages are the slowest client's.
A poll of 3 s is what Flower does by itself; `database` is the SuperLink's, in memory or on disk. With
`--direct` each federation is measured a second time with SuperNodes that go past the guard, and the ratio of
the two is what the guard costs.

    python benchmarks/federation.py --crowd 20 [--rounds 4] [--neighbours 4] [--no-durable]

How long that many clients on one machine take to start, to join and for a round, in seconds and in seconds of
a core, of all processes together; and what memory an idle one has: both its processes, what they share with
others divided among all (PSS), and what is theirs alone (USS). Seconds say little where others use the
machine too, so its load average is printed before anything is started.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from trilemma import config as configurations
from trilemma.federation import layout, provisioning
from trilemma.federation.commits import CommitLog
from trilemma.federation.processes import Command
from trilemma.federation.public_facts import Federation, Timing
from trilemma.federation.spending import write_budgets
from trilemma.federation.task import load_task
from trilemma.flower import deployment
from trilemma.flower.control import connect

FEATURES = 64
HIDDEN = {431_972: (610, 640), 10_009_022: (3120, 3140)}
TASK = """
import numpy as np
from trilemma import models

def model():
    return models.build("mlp", ({features},), 2, hidden={hidden})

def data(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=(200, {features}))
    return x, (x[:, 0] > 0).astype(int)
"""
OWN = ("journal", "ledger", "serialise", "admit", "commit")
"""The stages that are this package's and neither learning, nor noise, nor Flower."""


@contextmanager
def federation(
    clients: int, size: int, rounds: int, poll: float, durable: bool, neighbours: int | None = None
) -> Iterator[tuple[Path, list[layout.Party]]]:
    """Make a federation, and take it down in the end."""
    tables = {
        "federation": {"clients": clients, "tolerate": 1},
        "algorithm": {"name": "cafcor"},
        "aggregation": {"rule": "caf"},
        "privacy": {"threat": "secldp", "clip": 0.1, "sigma_cor": 0.5, "sigma_ind": 0.1},
        "run": {"rounds": rounds},
    }
    if neighbours is not None:
        tables["privacy"]["neighbours"] = neighbours
    config = configurations.parse(tables, [])
    with tempfile.TemporaryDirectory() as scratch:
        task = Path(scratch) / "task.py"
        task.write_text(TASK.format(features=FEATURES, hidden=HIDDEN[size]))
        folder = Path(scratch) / "federation"
        timing = Timing(round_limit=300.0, join_limit=120.0, poll=poll)
        facts = Federation(
            "bench", clients, port=23000 + os.getpid() % 20000, examples=200, durable=durable, timing=timing
        )
        made = provisioning.init(folder, facts, config.toml(), task=task)
        write_budgets(made[1:], load_task(made[0]), 1e9)
        try:
            yield folder, made
        finally:
            deployment.down(folder)


def measure(clients: int, size: int, rounds: int, poll: float, durable: bool) -> dict[str, float]:
    """Return median seconds per round and stage."""
    with federation(clients, size, rounds, poll, durable) as (folder, made):
        deployment.up(folder)
        _run_to_end(made[0])
        return _stages(folder, made)


def crowd(clients: int, size: int, rounds: int, durable: bool, neighbours: int | None) -> None:
    """Print what many clients on one machine take until they work, and what they weigh."""

    def found(what: str, figure: float, cores: float | None = None) -> None:
        of_cores = "" if cores is None else f" ({cores:.1f} s of a core)"
        print(f"{clients} clients, {what}: {figure:.2f}{of_cores}", flush=True)

    def weigh(when: str) -> None:
        pids = [one.pid for one in deployment.status(folder) if one.party != "server"]
        memory = [psutil.Process(pid).memory_full_info() for pid in pids]
        for kind in ("pss", "uss"):
            found(f"MB of one {when} ({kind})", sum(getattr(one, kind) for one in memory) / clients / 1e6)

    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with federation(clients, size, rounds, 0.2, durable, neighbours) as (folder, made):
        began = time.monotonic()
        deployment.up(folder)
        for party in made[1:]:
            _wait_for_port(party.federation.runtime_port(party.client or 0))
        found("seconds to start", time.monotonic() - began, _worked(folder))
        weigh("that is idle")
        log = CommitLog(made[0].run_folder("bench"))
        with connect(made[0]) as control:
            began, worked = time.monotonic(), _worked(folder)
            control.start(made[0].folder / "app", "bench")
            while (last := log.last()) is None or last.epoch is None or not last.epoch.members:
                time.sleep(0.1)
            found("seconds to join", time.monotonic() - began, _worked(folder) - worked)
            worked = _worked(folder)
            while len(log.records()) < rounds:
                time.sleep(0.1)
        of_cores = (_worked(folder) - worked) / rounds
        seconds = [record["seconds"] for record in log.records()]
        rounds_took = [one["exchange"] + one["admit"] + one["aggregate"] for one in seconds]
        found("seconds of the first round", rounds_took[0])
        found("seconds of a round", statistics.median(rounds_took[1:]), of_cores)
        weigh("that has worked")


def _worked(folder: Path) -> float:
    """Return how many seconds of a core the processes of a federation have had."""
    times = [psutil.Process(one.pid).cpu_times() for one in deployment.status(folder) if one.alive]
    return sum(one.user + one.system for one in times)


def _wait_for_port(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.1)


@contextmanager
def past_the_guard() -> Iterator[None]:
    """Let SuperNodes connect to the SuperLink itself, for a comparison."""
    honest = deployment.commands

    def commands(party: layout.Party) -> list[Command]:
        door, link = party.federation.address, party.federation.superlink
        return [
            replace(one, argv=tuple(link if word == door else word for word in one.argv))
            for one in honest(party)
        ]

    deployment.commands = commands
    try:
        yield
    finally:
        deployment.commands = honest


def _run_to_end(server: layout.Party) -> None:
    with connect(server) as control:
        run = control.start(server.folder / "app", "bench")
        while not control.status(run).startswith("finished"):
            time.sleep(1.0)
        if control.status(run) != "finished:completed":
            raise SystemExit((server.running / "worker.log").read_text()[-3000:])


def _stages(folder: Path, made: list[layout.Party]) -> dict[str, float]:
    # The first round loads data and compiles kernels; it is not what a round costs.
    records = CommitLog(made[0].run_folder("bench")).records()[1:]
    notes = [
        [json.loads(line)["seconds"] for line in path.read_text().splitlines()][1:]
        for path in folder.glob("client-*/state/runs/bench/notes.jsonl")
    ]
    rounds = []
    for index, record in enumerate(records):
        server = record["seconds"]
        slowest = {stage: max(note[index][stage] for note in notes) for stage in notes[0][index]}
        inside = max(sum(note[index].values()) for note in notes)
        total = server["exchange"] + server["admit"] + server["aggregate"] + server["commit"]
        flower = server["exchange"] - inside
        rounds.append(
            {
                **slowest,
                **{k: server[k] for k in ("admit", "aggregate", "commit")},
                "Flower": flower,
                "round": total,
            }
        )
    return {stage: statistics.median(one[stage] for one in rounds) for stage in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(HIDDEN), choices=list(HIDDEN))
    parser.add_argument("--polls", type=float, nargs="+", default=[0.2, 3.0])
    parser.add_argument("--crowd", type=int, help="start this many clients and look at them, nothing else")
    parser.add_argument("--neighbours", type=int, help="with --crowd: share secrets with so many only")
    parser.add_argument("--no-durable", action="store_true", help="with --crowd: no database")
    parser.add_argument("--direct", action="store_true", help="measure without the guard too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a federation is taken down all the same
    if options.crowd:
        durable = not options.no_durable
        crowd(options.crowd, options.sizes[0], options.rounds, durable, options.neighbours)
        return
    table = Table(title=f"{options.clients} clients, median seconds per round; {os.cpu_count()} cores")
    rows = []
    for size in options.sizes:
        for poll, durable in [(poll, durable) for poll in options.polls for durable in (False, True)]:
            stages = measure(options.clients, size, options.rounds, poll, durable)
            stages["own"] = sum(stages[stage] for stage in OWN)
            rows.append((size, poll, durable, stages))
            print(f"{size:,} parameters, poll {poll:g}, {stages['round']:.2f} s", file=sys.stderr, flush=True)
            if options.direct:
                with past_the_guard():
                    direct = measure(options.clients, size, options.rounds, poll, durable)["round"]
                print(f"past the guard {direct:.2f} s: ratio {stages['round'] / direct:.2f}", flush=True)
    for column in ("parameters", "poll", "database", *rows[0][3], "own share"):
        table.add_column(column, justify="right")
    for size, poll, durable, stages in rows:
        cells = [f"{seconds:.3f}" for seconds in stages.values()]
        share = f"{stages['own'] / stages['round']:.1%}"
        table.add_row(f"{size:,}", f"{poll:g}", "yes" if durable else "no", *cells, share)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
