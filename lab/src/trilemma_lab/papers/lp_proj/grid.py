"""The grid of lp-proj's experiments: data sets, attacks, points, and what the paper printed for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trilemma import experiment as config
from trilemma.base.errors import ConfigError, nearest
from trilemma.experiment import Config
from trilemma_lab.compressed.wire import QuantisedFormat
from trilemma_lab.papers.lp_proj.methods import CHOSEN, METHODS, TABLES
from trilemma_lab.papers.published import line

ROUNDS = 200
"""Rounds T. Not printed; the default of the authors' code, above every budget of Table 4."""


@dataclass(frozen=True)
class Rounds:
    """Rounds without attack and under one, of every method alike; fewer than `ROUNDS` where a round is long.

    >>> Rounds(attacked=20).of(percent=80), Rounds(attacked=20).of(percent=0)
    (20, 200)
    """

    clean: int = ROUNDS
    attacked: int = ROUNDS

    def of(self, percent: int) -> int:
        """Return the rounds with so many per cent of liars."""
        return self.attacked if percent else self.clean


ATTACKS = {5: "same-value", 6: "scaled-flip", 7: "gaussian", 8: "data-poison"}
"""Attack of each robustness table."""

SHARES = {5: (10, 20, 50, 80), 6: (10, 20, 50, 80), 7: (10, 20, 50, 80), 8: (2, 5, 10, 20)}
"""Per cent of Byzantine clients in each robustness table."""


@dataclass(frozen=True)
class Benchmark:
    """A data set of the paper with its model, number of clients, projected dimension, budget and target.

    `rounds` are those of all methods: methods that ran for unequal times cannot be compared. `precision` is
    that of clients' products on a GPU.
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
    rounds: Rounds = Rounds()
    precision: Literal["float32", "tf32"] = "float32"


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
        *(
            "FashionMNIST",
            _images("fashion-mnist", 2, "random"),
            "fashion-resnet",
            100,
            20,
            600,
            3384000,
            0.7,
            2,
        ),
        rounds=Rounds(clean=50, attacked=10),
        precision="tf32",
    ),
    "cifar": Benchmark(
        *("CIFAR", _images("cifar10", 2, "random"), "cifar-cnn", 200, 20, 60, 1029600, 0.4, 2),
        rounds=Rounds(attacked=20),
        precision="tf32",
    ),
    "emnist": Benchmark(
        *("EMNIST", _images("emnist", 10, "random"), "emnist-mlp", 248, 25, 80, 4236900, 0.7),
        rounds=Rounds(attacked=100),
    ),
}
"""The six data sets. S = 20 on MNIST and FashionMNIST: the printed costs leave no other value."""


@dataclass(frozen=True)
class GridPoint:
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
        rounds: int | None = None,
        seeds: Sequence[int] = (1, 2, 3, 4, 5),
        choice: Mapping[str, Any] | None = None,
    ) -> Config:
        """Return the point as a configuration; `choice` overrides the chosen hyper-parameters.

        Local hears nobody, so that all attacks of as many liars are one run: that in which they do nothing.

        >>> GridPoint("synthetic00", "lp-proj-1", "same-value", 80).config().federation.byzantine
        80
        """
        task, method = lookup(TASKS, self.task, "data set"), lookup(METHODS, self.method, "method")
        rounds = rounds or task.rounds.of(self.percent)
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
            "attack": {"name": "none" if algorithm["name"] == "local" else self.attack},
            "run": {
                "rounds": rounds,
                "seeds": list(seeds),
                "evaluate_every": 1 if rounds <= ROUNDS else 5,
                "precision": task.precision,
            },
        }
        return config.parse(tables, [])


def lookup(table: Mapping[str, Any], name: str, kind: str) -> Any:
    """Return `table[name]`, or say which names there are."""
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}: {nearest(name, table)}")
    return table[name]


def points(task: str, table: int) -> list[GridPoint]:
    """Return the cells of a table for a data set, the clean column included.

    >>> len(points("synthetic00", 5)), len(points("mnist", 3))
    (40, 13)
    """
    if table not in TABLES:
        raise ConfigError(f"there is no Table {table} of results; allowed: {', '.join(map(str, TABLES))}")
    methods = [m for m in TABLES[table] if not (m == "LG-FedAvg" and task.startswith("synthetic"))]
    clean = [GridPoint(task, method) for method in methods]
    return clean + [
        GridPoint(task, method, ATTACKS[table], percent)
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
    return line("lp-proj", f"lp-proj-{task}", f"Table {table}", method).split()


def quantised_scalars(dim: int, sampled: int, levels: int = 5, bucket: int = 500) -> float:
    """Return what the paper counts for a round of QSGD: quantised both ways.

    >>> quantised_scalars(610, 10)
    1565.0
    """
    return 2 * sampled * QuantisedFormat(dim, bucket, levels).scalars
