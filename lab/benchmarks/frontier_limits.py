"""What limits the frontier: what examples have in common, what liars have to cancel, what centring assumes.

    python lab/benchmarks/frontier_limits.py common     how much of their length features have in common
    python lab/benchmarks/frontier_limits.py cancelled  how much of an honest mean liars can cancel (CNN)
    python lab/benchmarks/frontier_limits.py centre     own means off, or whitened, where data differ
    python lab/benchmarks/frontier_limits.py whose      whose mean and covariance new examples are seen by

Options: --seeds 1,2; --device cuda; --out FILE keeps what `centre` measured, and --show prints that file.
docs/frontier.md and docs/frontier-notes.md quote them.
"""

from __future__ import annotations

import argparse
import bisect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma import config, models
from trilemma.base import files
from trilemma.data import Dataset, Holdings
from trilemma.data.features import centred
from trilemma.data.types import each
from trilemma.learning.defences.evidence import hidden_shift
from trilemma.privacy import Noiseless
from trilemma.privacy.types import NoiseLaw
from trilemma.simulate import engine
from trilemma.simulate.evaluation import evaluate
from trilemma.simulate.experiment import assemble
from trilemma_lab.arena import arena

FEATURES = {
    "64 components of strokes as they fall": (
        "data.features={name='strokes', components=64}",
        "data.centre=false",
    ),
    "32 components of strokes in a box of 20": ("data.centre=false",),
    "the same, each client's own mean taken off": (),
}


def common(given: argparse.Namespace) -> None:
    """Print the length of the examples' mean as a share of their root mean square length."""
    for name, changes in FEATURES.items():
        ready = assemble(config.load("frontier-mnist").with_(*changes), 1)
        rows = ready.clients.data.dataset.x_train.double()
        share = float(rows.mean(0).norm() / (rows**2).sum(1).mean().sqrt())
        print(f"{name}: {share:.2f} of their length in common", flush=True)


def cancelled(given: argparse.Namespace) -> None:
    """Print how much of the honest mean of one release liars can cancel unseen, for what a server may know.

    Liars who push straight against the honest mean h need no more than to cancel it: of a mean of length 0
    without noise nothing is seen, so that only the spectrum stops them. A server that looked at layers apart,
    each weighed as is best against h, would see shifts s_l in layers l where Σ (s_l/u_l)⁴ > 1, u_l what is
    unseen in as many coordinates: signals to noise of independent looks add up in squares, and each is the
    square of a shift. One that knew the square of every number in h would see as in (Σ h²)²/Σ h⁴ dimensions.
    """
    ground = arena.GROUNDS["mnist-cnn-once"]
    for f in (5, 10):
        changes = [*ground.changes, *arena.THREATS["published SecLDP"], f"federation.byzantine={f}"]
        made = config.load(ground.ready).with_(*changes, "aggregation.rule=mean", "attack.name=none")
        ready = assemble(made, int(given.seeds.split(",")[0]), device=torch.device(given.device))
        some = replace(ready.clients.only(*range(given.clients)), noise=Noiseless())
        start = engine.start(ready).broadcast["params"]
        step = ready.resolved.algorithm.client({"params": start}, {}, some, 0, ready.key.fold("round", 0))
        mean, release = (step.messages.vectors - start).mean(0).cpu().double(), ready.resolved.release
        assert release is not None

        def unseen(dim: float, f: int = f, law: NoiseLaw = release.law, clip: float = release.clip) -> float:
            return hidden_shift(law, clip, 100, f, max(1, round(dim)), 1).mean

        parts = _by_layer(models.unflatten(some.model, mean[None]))
        length, energy = float(mean.norm()), mean**2
        layers = sum((size / unseen(dim)) ** 4 for size, dim in parts.values()) ** -0.25
        fewer = float(energy.sum() ** 2 / (energy**2).sum())
        print(
            f"f = {f}: honest mean {length / release.clip:.2f} clips; the share that is cancelled unseen is"
        )
        print(f"  {unseen(len(mean)) / length:.2f} for all {len(mean):,} coordinates together")
        print(f"  {layers:.2f} for layers apart")
        print(f"  {unseen(fewer) / length:.2f} for a server that knew how h is spread (d' = {fewer:,.0f})")
        few = bisect.bisect_right(range(1, len(mean)), length / 3, key=unseen)
        print(f"  1/3 where no more than {few:,} coordinates are trained and h is as long")
        for name, (size, dim) in parts.items() if f == 5 else ():
            print(f"    {name}: {dim:,} coordinates, {(size / length) ** 2:.2f} of the energy")


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Return length and number of coordinates of every layer, weights and biases together."""
    found: dict[str, tuple[float, int]] = {}
    for name, tensor in tensors.items():
        square, dim = found.get(name.rpartition(".")[0], (0.0, 0))
        found[name.rpartition(".")[0]] = square + float((tensor**2).sum()), dim + tensor.numel()
    return {name: (square**0.5, dim) for name, (square, dim) in found.items()}


PARTITIONS = {
    "homogeneous": "homogeneous",
    "Dirichlet(1)": "{name='dirichlet', alpha=1.0}",
    "Dirichlet(0.1)": "{name='dirichlet', alpha=0.1}",
    "one label each": "extreme",
}
PUSHES = ("none", "loss", "rotated loss")
JUDGED = ("caf", "evidence+mean")
SEEN = {
    "as they are": ("frontier-mnist", "data.centre=false"),
    "own mean taken off": ("frontier-mnist",),
    "whitened, no bias": ("frontier-mnist-whitened",),
}
"""How clients see their examples: a ready configuration, and changes to it."""


def centre(given: argparse.Namespace) -> None:
    """Train on features of data that differ between clients, seen by own means and covariances or not."""
    path = Path(given.out) if given.out else None
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []
    names = ("partition", "seen", "rule", "adversary", "seed")
    known = {tuple(row[name] for name in names) for row in rows}
    wanted = [
        (partition, seen, rule, push, seed)
        for seed in map(int, given.seeds.split(","))
        for partition in PARTITIONS
        for seen in SEEN
        for rule in JUDGED
        for push in PUSHES
    ]
    for place in wanted if not given.show else ():
        if place not in known:
            rows.append({**dict(zip(names, place, strict=True)), "accuracy": round(_accuracy(*place), 4)})
            if path:
                lines = ",\n".join(json.dumps(one) for one in rows)
                files.write_atomically(path, f"[\n{lines}\n]\n".encode())
    print("| clients' data | examples | rule | " + " | ".join(PUSHES) + " |")
    print("|---|---|---|" + "---:|" * len(PUSHES))
    for partition in PARTITIONS:
        for seen in SEEN:
            for rule in JUDGED:
                some = [
                    row
                    for row in rows
                    if (row["partition"], row["seen"], row["rule"]) == (partition, seen, rule)
                ]
                cells = [[row["accuracy"] for row in some if row["adversary"] == push] for push in PUSHES]
                shown = " | ".join(f"{min(cell):.2f}" if cell else "–" for cell in cells)
                print(f"| {partition} | {seen} | {rule} | {shown} |")


def _accuracy(partition: str, seen: str, rule: str, push: str, seed: int) -> float:
    """Return the accuracy of a ready configuration with ten liars."""
    lies, (ready_made, *changes) = arena.ADVERSARIES.get(push, ("attack.name=none",)), SEEN[seen]
    changes += [f"data.partition={PARTITIONS[partition]}", f"aggregation.rule={rule}"]
    ready = assemble(config.load(ready_made).with_(*changes, "federation.byzantine=10", *lies), seed)
    progress = engine.start(ready)
    for _ in range(ready.config.run.rounds):
        progress, _ = engine.step(ready, progress)
    return float(evaluate(ready, progress.chosen, {}).plain()["accuracy"] or 0.0)


def whose(given: argparse.Namespace) -> None:
    """Print accuracies without liars on test examples seen by their own statistics, or by a client's."""
    print(
        "| clients' data | examples | by all test examples | by 100 of them | by a client's, mean | least |"
    )
    print("|---|---|---:|---:|---:|---:|")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    for partition, said in PARTITIONS.items():
        for seen, (ready_made, *changes) in [*SEEN.items()][1:]:
            found = torch.tensor(
                [_by_statistics(ready_made, [*changes, f"data.partition={said}"], seed) for seed in seeds]
            )
            shown = " | ".join(f"{accuracy:.2f}" for accuracy in found.amin(0).tolist())
            print(f"| {partition} | {seen} | {shown} |", flush=True)


def _by_statistics(ready_made: str, changes: list[str], seed: int) -> list[float]:
    """Return the accuracies by all test examples' statistics, by some of theirs, by clients': mean, least."""
    quiet = "aggregation.rule=caf", "federation.byzantine=10", "attack.name=none"
    chosen = config.load(ready_made).with_(*changes, *quiet)
    ready = assemble(chosen, seed)
    plain = assemble(chosen.with_("data.centre=false", "data.whiten=false"), seed).clients.data
    progress, _ = engine.step(ready, engine.start(ready))
    tests, y = plain.dataset.x_test, plain.dataset.y_test

    def accuracy(x: Tensor, labels: Tensor) -> float:
        score = models.evaluate(ready.clients.model, progress.chosen, x, labels, per_client=False)
        return float(score.accuracy)

    def around(dataset: Dataset, holdings: Holdings) -> Tensor:
        found = centred(dataset, holdings, chosen.holding.whiten).x_test
        assert isinstance(found, Tensor)
        return found

    some, nobody, everything = slice(100), Holdings([], [], []), np.arange(len(y))
    few = replace(plain.dataset, x_test=each(tests, lambda column: column[some]), y_test=y[some])
    by_clients = [
        accuracy(around(plain.dataset, Holdings([plain.holdings.train[i]], [], [everything])), y)
        for i in range(0, 90, 3)
    ]
    return [
        accuracy(around(plain.dataset, nobody), y),
        accuracy(around(few, nobody), y[some]),
        sum(by_clients) / len(by_clients),
        min(by_clients),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["common", "cancelled", "centre", "whose"])
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--clients", type=int, default=6, help="honest clients that `cancelled` trains")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("--show", action="store_true")
    chosen = parser.parse_args()
    {"common": common, "cancelled": cancelled, "centre": centre, "whose": whose}[chosen.what](chosen)
