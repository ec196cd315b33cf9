"""Personalised learning: all clients at once against one after the other, and projections from a seed.

    export PYTHONPATH=benchmarks
    python lab/benchmarks/personal.py round       one lp-proj round on Synthetic(0, 0), stacked and as a loop
    python lab/benchmarks/personal.py projection  P of 600 × 678,794: stored and redrawn, time and memory
    python lab/benchmarks/personal.py fashion     one lp-proj round of 100 ResNets on a GPU, float32 and TF32

The loop is what the methods' reference implementations do: per client and step a batch, `backward`, a
gradient clip and the two products with P, in plain PyTorch on the same data. Both run in the same process, in
turns, equally often.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trilemma import config, simulate
from trilemma.base.keys import Key
from trilemma.models.coordinates import projection
from trilemma.simulate import Experiment, engine
from trilemma_lab.papers import studies
from turns import alone, timed

STEPS, ROUNDS, BATCH, DIM = 20, 5, 64, 21


def federation() -> Experiment:
    tables = {
        "data": {"name": "synthetic", "size": 315, "holders": "all"},
        "model": {"name": "multinomial"},
        "federation": {"clients": 100, "sampled": 10},
        "algorithm": {
            "name": "lp-proj", "p": 2, "dim": DIM, "lam": 0.1, "local_rounds": ROUNDS, "inner_steps": STEPS,
        },
        "run": {"device": "cpu"},
    }  # fmt: skip
    return simulate.assemble(config.parse(tables, []), seed=1)


class Loop:
    """The same round, one client after the other."""

    def __init__(self, experiment: Experiment) -> None:
        clients = experiment.clients
        held = [clients.data.everything([i]) for i in clients.ids]
        self.data = [(batch.x[0][batch.weight[0] > 0], batch.y[0][batch.weight[0] > 0]) for batch in held]
        self.models = [nn.Linear(60, 10) for _ in clients.ids]
        self.p = projection.gaussian(DIM, 610, Key(1)).lift(torch.eye(DIM))
        self.w = torch.zeros(DIM)

    def __call__(self) -> None:
        """Run one round."""
        self.w = torch.stack([self._client(k) for k in range(len(self.data))])[:10].mean(0)

    def _client(self, k: int) -> Tensor:
        model, (x, y), w = self.models[k], self.data[k], self.w.clone()
        order, position = torch.randperm(len(x)), 0
        for _ in range(ROUNDS):
            for _ in range(STEPS):
                if position >= len(x):
                    order, position = torch.randperm(len(x)), 0
                rows = order[position : position + BATCH]
                position += BATCH
                model.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 60.0)
                with torch.no_grad():
                    flat = nn.utils.parameters_to_vector(model.parameters())
                    grad = nn.utils.parameters_to_vector([q.grad for q in model.parameters()])
                    flat -= 0.1 * (grad + 0.001 * flat - 0.1 * self.p.T @ (w - self.p @ flat))
                    nn.utils.vector_to_parameters(flat, model.parameters())
            with torch.no_grad():
                flat = nn.utils.parameters_to_vector(model.parameters())
                w = w - 0.1 * 0.1 * (w - self.p @ flat)
        return w


def time_round(repeats: int) -> None:
    experiment = federation()
    progress, _ = simulate.step(experiment, simulate.start(experiment))
    loop = Loop(experiment)
    stacked, looped = [], []
    for _ in range(repeats):  # in turns, so that a busy machine slows both
        stacked.append(timed(lambda: simulate.step(experiment, progress)).seconds)
        looped.append(timed(loop).seconds)
    print(
        f"one round of lp-proj-2, 100 clients, R = {ROUNDS}, K = {STEPS}, {torch.get_num_threads()} threads"
    )
    print(f"{repeats} repetitions, load {os.getloadavg()[0]:.1f}")
    for name, choose in (("best", min), ("median", statistics.median)):
        ours, theirs = choose(stacked), choose(looped)
        print(f"{name:6}  stacked {ours:.3f} s   loop {theirs:.3f} s   ratio {theirs / ours:.1f}")


def time_projection(rows: int, columns: int, clients: tuple[int, ...], memory: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    p = projection.gaussian(rows, columns, Key(1), memory=memory)
    made = time.perf_counter() - start
    form = "redrawn" if p.stored is None else "stored"
    print(f"{form}: made in {made:.1f} s, load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
    for count in clients:
        x, c = torch.ones(count, columns), torch.ones(count, rows)
        applied = alone(lambda x=x: p.apply(x), 3).seconds
        lifted = alone(lambda c=c: p.lift(c), 3).seconds
        moved = alone(lambda x=x, c=c: p.advance(x, x, c), 3).seconds
        print(f"  k = {count:3}: P x {applied:.2f} s   Pᵀc {lifted:.2f} s   both in one pass {moved:.2f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"  peak memory above the start: {(peak - before) / 2**20:.2f} GiB (vectors included)")


def time_fashion(repeats: int, extra: list[str]) -> None:
    """Print the seconds of rounds of lp-proj-1 as Table 3 has it; kernels and recordings are made before."""
    places = studies["lp-proj-fashion"].runs("1")
    asked = next(p for p in places if (p.table, p.row, p.column) == ("Table 3", "lp-proj-1", "clean"))
    for precision in ("float32", "tf32"):
        experiment = simulate.assemble(asked.config.with_(f"run.precision={precision}", *extra), 1)
        progress, taken = engine.start(experiment), []
        for _ in range(2 + repeats):
            started = time.perf_counter()
            progress, _ = engine.step(experiment, progress)
            if experiment.device.type == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        print(f"{precision}: {', '.join(f'{seconds:.3f}' for seconds in taken[2:])} s a round", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["round", "projection", "fashion"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--columns", type=int, default=678_794)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--form", choices=["stored", "redrawn"], default="redrawn")
    parser.add_argument("--set", action="append", default=[], help="configuration, for fashion")
    given = parser.parse_args()
    if given.what == "round":
        time_round(given.repeats)
    elif given.what == "fashion":
        time_fashion(given.repeats, given.set)
    else:
        memory = 0 if given.form == "redrawn" else 1 << 40
        time_projection(given.rows, given.columns, tuple(given.clients), memory)


if __name__ == "__main__":
    main()
