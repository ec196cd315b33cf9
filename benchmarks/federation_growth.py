"""How a round grows with clients n and parameters d, and what that makes of a thousand clients and 10⁸.

    python benchmarks/federation_growth.py [--clients 4 8 16] [--dims 50000 200000 800000] [--neighbours 4]

Whole federations in one process (keys, ledgers, journals, commits, disks; no network), CafCor with pairwise
noise, everything as for messages that are long: in pieces, and in files. Each stage's seconds, a client's and
the server's, are fitted by what the stage does: a constant, d, and d times the number of streams (noise), of
messages, or of pairs of messages (the rule's Gram matrix); so is the memory each side's work takes, files'
pages apart. The last lines extrapolate the fits. `--large N D` does a server's work of two rounds with N
messages of D numbers; `--client N D` two rounds of one client of N, in a process of its own; `--aggregate N D
--limit GB` aggregates N messages of D numbers in a process that gets no more memory than that, files' pages
apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from trilemma import config as configurations
from trilemma.aggregation import parse, stream
from trilemma.base import files
from trilemma.base.stopwatch import Stopwatch
from trilemma.federation.carriers.grpc.transfers import DescribedBlock
from trilemma.federation.carriers.inprocess import InProcess
from trilemma.federation.client import node
from trilemma.federation.client.node import Node
from trilemma.federation.client.spending import write_budgets
from trilemma.federation.party import provisioning, sealed_files
from trilemma.federation.party.layout import Party, parties
from trilemma.federation.party.public_facts import Federation, Timing
from trilemma.federation.party.task import PartyTask, load_task
from trilemma.federation.protocol import disk_backed, kinds, wire
from trilemma.federation.protocol.disk_backed import DiskBacked
from trilemma.federation.protocol.transport import Reply
from trilemma.federation.server import hearing
from trilemma.federation.server.commits import Commit, CommitLog
from trilemma.federation.server.coordinator import open_run
from trilemma.federation.server.next_commit import NextCommit
from trilemma.learning import MessageLayout, Part
from trilemma.learning.messages import Asked, Parts
from trilemma.learning.steps import gridded, privatise
from trilemma.learning.steps.gridded import ColumnGridCodec
from trilemma.learning.steps.server import column_blocks
from trilemma.privacy.noise import grid as grids
from trilemma.privacy.noise.grid import Grid
from trilemma.privacy.types import NoiseLaw, Release
from trilemma.storage import mapped
from trilemma.storage.mapped import stacked

TASK = """
import numpy as np
from trilemma import models

def model():
    return models.build("mlp", (62,), 2, hidden={hidden})

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
    "commit": lambda n, k, d: [1.0, d],
    "client's bytes": lambda n, k, d: [1.0, d],
    "server's bytes": lambda n, k, d: [1.0, d, n * d],
}
"""What each stage's seconds, and each side's memory, are made of; k is with how many others a client shares
secrets."""


def founded(
    folder: Path, clients: int, task: Path, neighbours: int | None = None
) -> tuple[list[Party], PartyTask]:
    """Make a federation, of CafCor with noise between pairs; return its parties and the server's task."""
    privacy = {"threat": "secldp", "clip": 0.1, "sigma_cor": 0.5, "sigma_ind": 0.1}
    tables = {
        "federation": {"clients": clients, "tolerate": 1},
        "algorithm": {"name": "cafcor"},
        "aggregation": {"rule": "caf"},
        "privacy": privacy if neighbours is None else {**privacy, "neighbours": neighbours},
        "run": {"rounds": ROUNDS, "evaluate_every": ROUNDS},
    }
    facts = Federation("growth", clients, examples=60, timing=Timing(round_limit=600.0, poll=0.01))
    made = provisioning.init(folder, facts, configurations.parse(tables, []).toml(), task=task)
    loaded = load_task(made[0])
    write_budgets(made[1:], loaded, 1e9)
    return made, loaded


def measure(clients: int, dim: int, neighbours: int | None) -> tuple[int, dict[str, float]]:
    """Return the exact number of parameters and the median seconds of each stage."""
    with tempfile.TemporaryDirectory() as scratch:
        task, folder = Path(scratch) / "task.py", Path(scratch) / "federation"
        task.write_text(TASK.format(hidden=(max(1, dim // 65),)))
        made, loaded = founded(folder, clients, task, neighbours)
        memory = OwnMemory()
        with as_if_long(memory):
            open_run(made[0], "growth", WatchedGrowth(made, memory)).go()
        notes = [
            json.loads(line)["seconds"]
            for path in folder.glob("client-*/state/runs/growth/notes.jsonl")
            for line in path.read_text().splitlines()[1:]
        ]
        records = [one["seconds"] for one in CommitLog(made[0].run_folder("growth")).records()[1:]]
        found = {stage: statistics.median(one[stage] for one in notes) for stage in CLIENT}
        found |= {stage: statistics.median(one[stage] for one in records) for stage in SERVER}
        found |= {f"{side}'s bytes": float(memory.most[side]) for side in ("client", "server")}
        return loaded.model.dim, found


def growth(clients: list[int], dims: list[int], neighbours: int) -> None:
    """Measure, fit and extrapolate."""
    rows = []
    measure(3, 1000, None)  # what is imported, and compiled, is so once
    for n in clients:
        for d in dims:
            for k in {None, neighbours} if n == max(clients) else {None}:
                exact, found = measure(n, d, k)
                rows.append((n, n - 1 if k is None else k, exact, found))
                told = ", ".join(f"{stage} {_figure(stage, value)}" for stage, value in found.items())
                print(f"n = {n}, k = {rows[-1][1]}, d = {exact:,}: {told}", flush=True)
    fits = {}
    for stage, shape in GROWS.items():
        factors = np.array([shape(n, k, d) for n, k, d, _ in rows])
        seconds = np.array([found[stage] for *_, found in rows])
        weights = 1 / np.maximum(seconds, 1e-3)  # relative errors count; of bytes too
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
        each = ", ".join(f"{stage} {_figure(stage, value)}" for stage, value in told.items())
        print(
            f"expected at n = {n}, k = {k}, d = {d:.3g}: client {client:.0f} s, server {server:.0f} s "
            f"({each})"
        )


def large(clients: int, dim: int) -> None:
    """Do a server's work of two rounds of CafCor in files; say how long it took, and in how much memory."""
    law = NoiseLaw(sigma_ind=0.1, sigma_cor=0.5)
    grid = Grid.of(Release(0.1, law), dim, clients)

    def follow(fresh: Tensor, before: Parts, asked: Asked) -> Parts:
        return {"momentum": torch.lerp(fresh, before["momentum"], 0.9)}

    parts = Part("momentum", (dim,)), Part("steps", (dim,))
    layout = MessageLayout(parts, ("momentum",), ColumnGridCodec(grid, follow), ("momentum",))
    rule = parse("caf", f=clients // 5)
    stream(rule, [torch.randn(clients, 1 << 16)] * 2)
    with tempfile.TemporaryDirectory() as scratch:
        log = CommitLog(Path(scratch) / "run")
        disk_backed = DiskBacked(Path(scratch) / "messages", log.memory)
        model = {"params": torch.zeros(dim)}
        commit = Commit("run", "terms", 0, None, model, model)
        log.append(commit)
        sent = [_random_bytes(Path(scratch), grid.length) for _ in range(clients)]
        for round_ in range(2):
            watch, memory = Stopwatch(), OwnMemory()
            with memory.watched("server"):
                with watch.stage("read"):
                    read = {
                        client: disk_backed.read(
                            layout, {"encoded": data}, commit.remembered.get(client), Asked(round_, model)
                        )
                        for client, data in enumerate(sent)
                    }
                with watch.stage("stack"):
                    rows = {client: one.vectors[0] for client, one in read.items()}
                    blocks = partial(column_blocks, disk_backed.stack(rows, range(clients), dim))
                with watch.stage("aggregate"):
                    model = {"params": stream(rule, blocks).value}
                with watch.stage("commit"):
                    kept = {client: layout.to_remember(one) for client, one in read.items()}
                    commit = replace(
                        commit, rounds=round_ + 1, broadcast=model, server=model, remembered=kept
                    )
                    log.append(commit)
            told = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in watch.take().items())
            print(
                f"{clients} x {dim:,}, round {round_}: {4 * clients * dim / 1e9:.1f} GB, {told} s; "
                f"{memory.most['server'] / 1e9:.2f} GB of memory beside the files' pages, "
                f"{memory.most['server'] / 4 / dim:.1f} vectors",
                flush=True,
            )


def one_client(clients: int, dim: int) -> None:
    """Let one client of a federation answer two rounds, in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        task, folder = Path(scratch) / "task.py", Path(scratch) / "federation"
        width = max(1, math.isqrt(dim))
        task.write_text(TASK.format(hidden=(width, max(1, (dim - 64 * width) // (width + 3)))))
        made, loaded = founded(folder, clients, task)
        server = open_run(made[0], "growth", InProcess(made))
        commit = server.start()
        server._join(commit, 0)
        sent = Path(scratch) / "questions"
        sent.mkdir()
        for round_, heard in enumerate(({}, {"0": 0})):
            ask = kinds.Ask(run="growth", epoch=0, round=round_, heard=heard, unused=[])
            (sent / str(round_)).write_bytes(wire.dumps(ask, commit.broadcast))
        print(f"one of {clients} clients, d = {loaded.model.dim:,}", flush=True)
        command = [sys.executable, __file__, "--answer", str(made[1].folder), str(sent)]
        subprocess.run(command, check=True)


def answer(folder: Path, questions: Path) -> None:
    """Be that client."""
    node = Node(parties(folder)[0])
    for round_ in range(2):
        with (questions / str(round_)).open("rb") as file:
            block = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        memory, started = OwnMemory(), time.process_time()
        with memory.watched("client"):
            node.check_length(len(block))
            told = DescribedBlock.of(node.answer(block))
        notes = (node.party.run_folder("growth") / "notes.jsonl").read_text().splitlines()
        seconds = ", ".join(f"{stage} {one:.1f}" for stage, one in json.loads(notes[-1])["seconds"].items())
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"round {round_}: {time.process_time() - started:.1f} s of a core ({seconds}); "
            f"{memory.most['client'] / 1e9:.2f} GB of memory beside {memory.found / 1e9:.2f} found there; "
            f"with files' pages at most {most / 1e6:.2f}; an answer of {told.length / 1e9:.2f} GB",
            flush=True,
        )


def aggregate(clients: int, dim: int, limit: float, rules: list[str]) -> None:
    """Aggregate messages that lie in files within a limit of memory; print seconds, and a digest of each."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, headers = (
            Path(scratch),
            [kinds.Answer(client=i, run="r", epoch=0, round=0) for i in range(clients)],
        )
        for client, header in enumerate(headers):
            numbers = mapped.empty(folder, (dim,), torch.float32)
            generator = torch.Generator().manual_seed(client)
            for some in torch.split(numbers, 1 << 22):
                some.normal_(generator=generator)
            files.write_atomically(folder / str(client), *wire.parts_of(header, {"vector": numbers}))
        built = [parse(rule, f=clients // 5) for rule in rules]
        for rule in built:
            stream(rule, [torch.randn(clients, 1 << 16)] * 2)  # what is compiled is compiled before
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (int(limit * 1e9), int(limit * 1e9)))
        rows: list[Tensor | None] = []
        for client in range(clients):
            with (folder / str(client)).open("rb") as file:
                block = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            rows.append(wire.loads(block, kinds.Answer)[1]["vector"])
        whole = stacked(folder, rows, dim)
        for name, rule in zip(rules, built, strict=True):
            memory, started, spent = OwnMemory(), time.perf_counter(), time.process_time()
            with memory.watched("server"):
                value = stream(rule, partial(column_blocks, whole)).value
            told = hashlib.sha256(wire.raw(value)).hexdigest()[:16]
            if dim * clients <= 1 << 28:
                same = torch.equal(value, rule(torch.stack([row for row in rows if row is not None])).value)
                told += f", {'the same' if same else 'NOT the same'} to the bit as in memory"
            print(
                f"{name} of {clients} x {dim:,} ({4e-9 * clients * dim:.1f} GB) in {limit:g} GB: "
                f"{time.perf_counter() - started:.0f} s, {time.process_time() - spent:.0f} of a core, "
                f"{memory.most['server'] / 1e9:.2f} GB beside {memory.found / 1e9:.2f}; {told}",
                flush=True,
            )


def _random_bytes(folder: Path, length: int) -> Tensor:
    data = mapped.empty(folder, (length,), torch.uint8)
    for some in torch.split(data, 1 << 24):
        some.copy_(torch.frombuffer(bytearray(os.urandom(len(some))), dtype=torch.uint8))
    return data


class OwnMemory:
    """How much memory that is no file's each side's work took beside what it found: the most there was."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self.found = _own_memory()
        # Otherwise what was freed is kept for later, and the next who needs memory seems to need none.
        mapped.LARGE = 1 << 16
        mapped.give_back_what_is_freed()

    @contextmanager
    def watched(self, side: str) -> Iterator[None]:
        """Watch while this side works."""
        before, over = _own_memory(), threading.Event()

        def watch() -> None:
            while not over.wait(0.002):
                self.most[side] = max(self.most.get(side, 0), _own_memory() - before)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _own_memory() -> int:
    """Return the bytes this process has that are not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def as_if_long(memory: OwnMemory) -> Iterator[None]:
    """Treat all messages as long, and watch what the server does with them."""

    def watched(work: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object, **options: object) -> object:
            with memory.watched("server"):
                return work(*given, **options)

        return call

    with ExitStack() as stack:
        for place, name, stand_in in (
            (node, "SHORT", 1 << 18),
            (sealed_files, "LONG", 1 << 18),
            (disk_backed, "IN_MEMORY", 0),
            (privatise, "LONG", 1 << 14),
            (grids, "LONG", 1 << 14),
            (gridded, "TOGETHER", 1 << 14),
            (hearing, "admit", watched(hearing.admit)),
            (NextCommit, "after", watched(NextCommit.after)),
            (CommitLog, "append", watched(CommitLog.append)),
        ):
            stack.enter_context(patch.object(place, name, stand_in))
        yield


class WatchedGrowth(InProcess):
    """Nodes in this process whose memory is watched while they answer."""

    def __init__(self, parties: list[Party], memory: OwnMemory) -> None:
        super().__init__(parties)
        self.memory = memory

    def reply(self, node: int, block: bytes) -> Reply | None:
        """Answer; short questions are not worth watching."""
        with self.memory.watched("client") if wire.kind_of(block) == "ask" else nullcontext():
            return super().reply(node, block)


def _figure(stage: str, value: float) -> str:
    return f"{value / 1e6:.0f} MB" if "bytes" in stage else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--dims", type=int, nargs="+", default=[50_000, 200_000, 800_000])
    parser.add_argument("--neighbours", type=int, default=4)
    parser.add_argument("--large", type=int, nargs=2, metavar=("N", "D"))
    parser.add_argument("--client", type=int, nargs=2, metavar=("N", "D"))
    parser.add_argument("--aggregate", type=int, nargs=2, metavar=("N", "D"))
    parser.add_argument("--limit", type=float, default=0.0, help="GB; 0: none")
    parser.add_argument("--rules", nargs="+", default=["caf", "cwmed"])
    parser.add_argument("--answer", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large:
        large(*options.large)
    elif options.client:
        one_client(*options.client)
    elif options.answer:
        answer(*options.answer)
    elif options.aggregate:
        aggregate(*options.aggregate, options.limit, options.rules)
    else:
        growth(options.clients, options.dims, options.neighbours)


if __name__ == "__main__":
    main()
