"""The grid of lp-proj's experiments: data sets, methods, attacks, and what the paper printed for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilemma import config
from trilemma.config import Config
from trilemma.errors import ConfigError, nearest
from trilemma.learning.compressed.wire import QuantisedFormat
from trilemma.papers.lp_proj.printed import PRINTED

ROUNDS = 200
"""Rounds T. Not printed; the default of the authors' code, above every budget of Table 4."""

ATTACKS = {5: "same-value", 6: "scaled-flip", 7: "gaussian", 8: "data-poison"}
"""Attack of each robustness table."""

SHARES = {5: (10, 20, 50, 80), 6: (10, 20, 50, 80), 7: (10, 20, 50, 80), 8: (2, 5, 10, 20)}
"""Per cent of Byzantine clients in each robustness table."""


@dataclass(frozen=True)
class Benchmark:
    """A data set of the paper with its model, number of clients, projected dimension, budget and target.

    `subset` says that only part of the paper's data is at hand, so that numbers compare methods, not papers.
    """

    title: str
    data: Mapping[str, Any]
    model: str
    clients: int
    sampled: int
    dim: int
    budget: int
    target: float
    head_layers: int = 1
    subset: bool = False

    def per_round(self, method: str, full: int, head: int = 0) -> float:
        """Return the scalars the paper counts for one round of `method` on a model of `full` parameters.

        QSGD, DGC, LBGM and Sketch are counted message by message; here they have no fixed cost.

        >>> TASKS["mnist"].per_round("lp-proj-1", 79510), TASKS["mnist"].per_round("FedAvg", 79510)
        (6000, 3180400)
        """
        both = self.clients + self.sampled
        match method:
            case "lp-proj-1" | "lp-proj-2" | "lp-proj-1, R = 5" | "lp-proj-2, R = 5":
                return both * self.dim
            case "pFedMe" | "Ditto" | "RSA":
                return both * full
            case "LG-FedAvg":
                return both * head
            case "FedAvg" | "Per-FedAvg":
                return 2 * self.sampled * full
            case "Local" | "Local, 20 steps" | "Local, 100 steps":
                return 0
            case _:
                raise ConfigError(f"{method!r} has no fixed cost per round")


def _synthetic(spread: float) -> dict[str, Any]:
    return {"name": "synthetic", "alpha": spread, "beta": spread, "size": 315, "holders": "all"}


def _images(name: str, per_client: int, variant: str) -> dict[str, Any]:
    partition = {"name": "shards", "classes_per_client": per_client, "variant": variant}
    return {"name": name, "scaling": "lp-proj", "holders": "all", "partition": partition}


TASKS = {
    "synthetic00": Benchmark("Synthetic(0, 0)", _synthetic(0.0), "multinomial", 100, 10, 21, 328020, 0.6),
    "synthetic11": Benchmark("Synthetic(1, 1)", _synthetic(1.0), "multinomial", 100, 10, 21, 401940, 0.6),
    "mnist": Benchmark("MNIST", _images("mnist", 2, "equal"), "mnist-mlp", 100, 20, 50, 228000, 0.7),
    "fashion": Benchmark(
        "FashionMNIST", _images("fashion-mnist", 2, "random"), "fashion-resnet", 100, 20, 600, 3384000, 0.7, 2
    ),
    "cifar": Benchmark(
        "CIFAR", _images("cifar10", 2, "random"), "cifar-cnn", 200, 20, 60, 1029600, 0.4, 2, subset=True
    ),
    "emnist": Benchmark(
        "EMNIST", _images("emnist", 10, "random"), "emnist-mlp", 248, 25, 80, 4236900, 0.7, subset=True
    ),
}
"""The six data sets. S = 20 on MNIST and FashionMNIST: the printed costs leave no other value."""


@dataclass(frozen=True)
class Method:
    """A method of the tables: algorithm, rule, and the grid its hyper-parameters were chosen from."""

    algorithm: Mapping[str, Any]
    rule: str = "mean"
    grid: Mapping[str, Sequence[Any]] | None = None

    def choices(self) -> list[dict[str, Any]]:
        """Return every combination of the grid.

        >>> len(METHODS["lp-proj-1"].choices()), len(METHODS["Local"].choices())
        (54, 3)
        """
        grid = self.grid or {}
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


_LR, _PERSONAL, _LAMBDA = (0.05, 0.1, 0.5), (0.01, 0.05, 0.1), (0.1, 1.0, 10.0)
_BILEVEL = {"lr": _LR, "personal_lr": _PERSONAL, "lam": _LAMBDA, "local_rounds": (1, 5)}
_STEPS = {"lr": _LR, "local_steps": (1, 5)}

METHODS = {
    "Ditto": Method(
        {"name": "ditto"}, grid={"lr": _LR, "personal_lr": _PERSONAL, "lam": _LAMBDA, "local_steps": (1, 5)}
    ),
    "pFedMe": Method({"name": "pfedme"}, grid=_BILEVEL),
    "Per-FedAvg": Method(
        {"name": "per-fedavg", "preset": "reference"}, grid={"lr": _LR, "personal_lr": _PERSONAL}
    ),
    "FedAvg": Method({"name": "fedavg"}, grid=_STEPS),
    "Local": Method({"name": "local"}, grid={"lr": _LR}),
    "Local, 20 steps": Method({"name": "local", "steps": 20, "clip_gradients": 60.0}, grid={"lr": _PERSONAL}),
    "Local, 100 steps": Method(
        {"name": "local", "steps": 100, "clip_gradients": 60.0}, grid={"lr": _PERSONAL}
    ),
    "lp-proj-1": Method({"name": "lp-proj", "p": 1, "preset": "reference"}, grid=_BILEVEL),
    "lp-proj-2": Method({"name": "lp-proj", "p": 2, "preset": "reference"}, grid=_BILEVEL),
    "lp-proj-1, R = 5": Method({"name": "lp-proj", "p": 1, "preset": "reference"}, grid=_BILEVEL),
    "lp-proj-2, R = 5": Method({"name": "lp-proj", "p": 2, "preset": "reference"}, grid=_BILEVEL),
    "RSA": Method({"name": "rsa"}, grid=_BILEVEL),
    "LG-FedAvg": Method({"name": "lg-fedavg"}, grid=_STEPS),
    "Global+Mean": Method({"name": "fedavg"}, grid=_STEPS),
    "Global+Median": Method({"name": "fedavg"}, "cwmed", grid=_STEPS),
    "Global+Krum": Method({"name": "fedavg"}, "krum", grid=_STEPS),
    "Sketch": Method(
        {"name": "sketch"},
        grid={"lr": _LR, "columns": (0.02, 0.05), "rows": (0.005, 0.01), "kept": (0.01, 0.05)},
    ),
    "LBGM": Method({"name": "lbgm"}, grid={**_STEPS, "threshold": (0.2, 0.5, 0.8)}),
    "QSGD": Method({"name": "qsgd"}, grid={"lr": _LR, "levels": (5, 10, 15), "bucket": (500, 1000, 2000)}),
    "DGC": Method(
        {"name": "dgc"}, grid={"lr": _LR, "sparsity": (0.25, 0.5, 0.75), "rising": (0.75, 0.5, 0.25)}
    ),
}
"""Every method of the tables; Local with lp-proj's number of steps (K = 20, R·K = 100), which they lack."""

TABLES: dict[int, tuple[str, ...]] = {
    3: (
        "Ditto",
        "pFedMe",
        "Per-FedAvg",
        "FedAvg",
        "Local",
        "Local, 20 steps",
        "Local, 100 steps",
        "lp-proj-1",
        "lp-proj-2",
        "lp-proj-1, R = 5",
        "lp-proj-2, R = 5",
        "RSA",
        "LG-FedAvg",
    ),
    4: ("FedAvg", "Sketch", "Local, 20 steps", "lp-proj-1", "lp-proj-2", "LG-FedAvg", "LBGM", "QSGD", "DGC"),
    **dict.fromkeys(
        (5, 6, 7, 8),
        (
            "Ditto",
            "Global+Mean",
            "Global+Median",
            "Global+Krum",
            "RSA",
            "Local, 20 steps",
            "lp-proj-1",
            "lp-proj-2",
        ),
    ),
}
"""Methods of each table. LG-FedAvg needs more than one layer: not on Synthetic.

Local with lp-proj's budget is in every one: no attack touches it, but who is scored changes with the liars.
"""

_SYNTHETIC: dict[str, dict[str, Any]] = {
    "Ditto": {"lr": 0.1, "personal_lr": 0.05, "lam": 0.1, "local_steps": 5},
    "pFedMe": {"lr": 0.1, "personal_lr": 0.05, "lam": 0.1, "local_rounds": 1},
    "Per-FedAvg": {"lr": 0.1, "personal_lr": 0.1},
    "FedAvg": {"lr": 0.5, "local_steps": 1},
    "Local": {"lr": 0.1},
    "Local, 20 steps": {"lr": 0.1},
    "Local, 100 steps": {"lr": 0.1},
    "lp-proj-1": {"lr": 0.1, "personal_lr": 0.1, "lam": 0.1, "local_rounds": 1},
    "lp-proj-2": {"lr": 0.1, "personal_lr": 0.1, "lam": 0.1, "local_rounds": 1},
    "lp-proj-1, R = 5": {"lr": 0.1, "personal_lr": 0.1, "lam": 0.1, "local_rounds": 5},
    "lp-proj-2, R = 5": {"lr": 0.1, "personal_lr": 0.1, "lam": 0.1, "local_rounds": 5},
    "RSA": {"lr": 0.05, "personal_lr": 0.05, "lam": 0.1, "local_rounds": 1},
    "Global+Mean": {"lr": 0.5, "local_steps": 1},
    "Global+Median": {"lr": 0.5, "local_steps": 1},
    "Global+Krum": {"lr": 0.5, "local_steps": 1},
    "Sketch": {"lr": 0.05, "columns": 0.05, "rows": 0.005, "kept": 0.05},
    "LBGM": {"lr": 0.5, "local_steps": 1, "threshold": 0.2},
    "QSGD": {"lr": 0.5, "levels": 5, "bucket": 500},
    "DGC": {"lr": 0.1, "sparsity": 0.25, "rising": 0.75},
}

_IMAGES: dict[str, dict[str, Any]] = {
    **_SYNTHETIC,
    "Ditto": {"lr": 0.1, "personal_lr": 0.1, "lam": 0.1, "local_steps": 5},
    "pFedMe": {"lr": 0.1, "personal_lr": 0.1, "lam": 0.1, "local_rounds": 1},
    "FedAvg": {"lr": 0.1, "local_steps": 5},
    "LG-FedAvg": {"lr": 0.1, "local_steps": 5},
    "Global+Mean": {"lr": 0.1, "local_steps": 5},
    "Global+Median": {"lr": 0.1, "local_steps": 5},
    "Global+Krum": {"lr": 0.1, "local_steps": 5},
}

_GLOBAL = {"lr": 0.5, "local_steps": 5}

_MNIST: dict[str, dict[str, Any]] = {
    **_IMAGES,
    "Ditto": {"lr": 0.1, "personal_lr": 0.1, "lam": 0.1, "local_steps": 5},
    "pFedMe": {"lr": 0.1, "personal_lr": 0.05, "lam": 0.1, "local_rounds": 1},
    "Per-FedAvg": {"lr": 0.5, "personal_lr": 0.05},
    "FedAvg": _GLOBAL,
    "Local": {"lr": 0.5},
    "lp-proj-1": {"lr": 0.1, "personal_lr": 0.1, "lam": 1.0, "local_rounds": 1},
    "lp-proj-2": {"lr": 0.1, "personal_lr": 0.05, "lam": 1.0, "local_rounds": 1},
    "RSA": {"lr": 0.5, "personal_lr": 0.01, "lam": 0.1, "local_rounds": 1},
    "LG-FedAvg": {"lr": 0.1, "local_steps": 5},
    "Global+Mean": _GLOBAL,
    "Global+Median": _GLOBAL,
    "Global+Krum": _GLOBAL,
    "Sketch": {"lr": 0.5, "columns": 0.02, "rows": 0.005, "kept": 0.05},
    "LBGM": {"lr": 0.5, "local_steps": 1, "threshold": 0.2},
    "QSGD": {"lr": 0.5, "levels": 5, "bucket": 500},
    "DGC": {"lr": 0.05, "sparsity": 0.75, "rising": 0.75},
}

CHOSEN = {
    "synthetic00": _SYNTHETIC,
    "synthetic11": _SYNTHETIC,
    "mnist": _MNIST,
    **dict.fromkeys(("fashion", "cifar", "emnist"), _IMAGES),
}
"""The grid point each method runs with, without attack and under all of them.

By validation accuracy, seed 101, over the part of the grid that was affordable; `tune` searches all of it, as
the paper does on each data set.

Synthetic: on Synthetic(0, 0) and used for both. All of the grid for FedAvg, Local, Per-FedAvg, LBGM, DGC and
Sketch; bucket 500 for QSGD; R = 1 and λ = 0.1 for RSA, pFedMe and Ditto; η_l = 0.1 and λ ≤ 1 for lp-proj.
Local keeps 0.1 (0.05 scored 0.0008 more).

MNIST: after 200 rounds, all of the grid for FedAvg, LG-FedAvg, Local and Per-FedAvg; threshold 0.2 for LBGM;
η_l ≥ 0.1, levels 5 and 15, bucket 500 for QSGD (levels equal at 0.5); rising 0.75, sparsity 0.25 and 0.75 for
DGC. After 60 rounds: η_l = 0.1, η_p ≥ 0.05, λ ≤ 1, R = 1 for lp-proj (all four within 0.0009); λ = 0.1 and
R = 1, η_l 0.05 and 0.5 for RSA; η_l ≥ 0.1, η_p ≥ 0.05, λ ≤ 1, R = 1 for pFedMe (less η_l = 0.5 with λ = 1);
η_l ≥ 0.1, η_p = 0.1, λ ≤ 1, R = 5 for Ditto; η_l alone for Sketch.

Global+Median and Global+Krum take FedAvg's values, Local with more steps lp-proj-1's η_p. The other
image sets: from the middle of the grid, not tuned.
"""


@dataclass(frozen=True)
class Point:
    """One cell: a data set, a method, and `percent` of the clients attacking with `attack`."""

    task: str
    method: str
    attack: str = "none"
    percent: int = 0

    @property
    def folder(self) -> Path:
        """Where the point runs, below the output directory."""
        name = "".join(c if c.isalnum() or c == "-" else "_" for c in self.method)
        return Path(self.task) / name / (f"{self.attack}-{self.percent}" if self.percent else "clean")

    def config(
        self,
        rounds: int = ROUNDS,
        seeds: Sequence[int] = (1, 2, 3, 4, 5),
        choice: Mapping[str, Any] | None = None,
    ) -> Config:
        """Return the point as a configuration; `choice` overrides the chosen hyper-parameters.

        >>> Point("synthetic00", "lp-proj-1", "same-value", 80).config().federation.byzantine
        80
        """
        task, method = lookup(TASKS, self.task, "data set"), lookup(METHODS, self.method, "method")
        liars = round(task.clients * self.percent / 100)
        algorithm = {**method.algorithm, **(CHOSEN[self.task][self.method] if choice is None else choice)}
        if algorithm["name"] == "lp-proj":
            algorithm["dim"] = task.dim
        if algorithm["name"] == "lg-fedavg":
            algorithm["head_layers"] = task.head_layers
        # The rule is told what fits into S messages: f = ⌊S·share⌋ leaves no majority from 50 % on.
        told = min(math.floor(task.sampled * self.percent / 100), (task.sampled - 1) // 2)
        federation = {
            "clients": task.clients,
            "sampled": task.sampled,
            "byzantine": liars,
            "tolerate": told if method.rule == "krum" else 0,
            "placement": "random",
        }
        tables = {
            "data": dict(task.data),
            "model": {"name": task.model},
            "federation": federation,
            "algorithm": algorithm,
            "aggregation": {"rule": method.rule},
            "attack": {"name": self.attack},
            "run": {"rounds": rounds, "seeds": list(seeds), "evaluate_every": 1 if rounds <= 200 else 5},
        }
        return config.parse(tables, [])


def lookup(table: Mapping[str, Any], name: str, kind: str) -> Any:
    """Return `table[name]`, or say which names there are."""
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}: {nearest(name, table)}")
    return table[name]


def points(task: str, table: int) -> list[Point]:
    """Return the cells of a table for a data set, the clean column included.

    >>> len(points("synthetic00", 5)), len(points("mnist", 3))
    (40, 13)
    """
    if table not in TABLES:
        raise ConfigError(f"there is no Table {table} of results; allowed: {', '.join(map(str, TABLES))}")
    methods = [m for m in TABLES[table] if not (m == "LG-FedAvg" and task.startswith("synthetic"))]
    clean = [Point(task, method) for method in methods]
    return clean + [
        Point(task, method, ATTACKS[table], percent)
        for method in methods
        for percent in SHARES.get(table, ())
    ]


def printed(table: int, task: str, method: str) -> list[str]:
    """Return the paper's cells of one row; empty where it has no such row.

    >>> printed(3, "synthetic00", "lp-proj-1")[2]
    '0.8868/0.0010'
    >>> printed(6, "synthetic00", "lp-proj-2")[3]
    '*/*'
    """
    for line in PRINTED.strip().split("\n"):
        number, where, name, *cells = line.split(" ")
        if (int(number), where, name) == (table, task, method):
            return cells
    return []


def quantised_scalars(dim: int, sampled: int, levels: int = 5, bucket: int = 500) -> float:
    """Return what the paper counts for a round of QSGD: quantised both ways.

    >>> quantised_scalars(610, 10)
    1565.0
    """
    return 2 * sampled * QuantisedFormat(dim, bucket, levels).scalars
