"""The experiments of lp-proj: Tables 3 to 8, their grids, their printed numbers, and ours beside them.

    python -m trilemma.papers.lp_proj run synthetic00 --table 3 --out runs/lp-proj
    python -m trilemma.papers.lp_proj compare synthetic00 --table 3 --out runs/lp-proj

A point is a data set, a method, an attack and a share of Byzantine clients; it runs in a directory of its own
and continues where it was stopped. What the paper does not say (rounds, inner steps, chosen hyper-parameters)
is set here: `ROUNDS`, the defaults of the algorithms, and `CHOSEN`, found by `tune` on validation accuracy.

Reference: Lin, Han, Li, Zhang, "Personalized federated learning towards communication efficiency, robustness
and fairness", NeurIPS 2022, Appendix C.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from trilemma import config, data, models, simulate
from trilemma.config import Config
from trilemma.errors import ConfigError, nearest
from trilemma.learning.compressed.wire import QuantisedFormat
from trilemma.papers.lp_proj_tables import PRINTED
from trilemma.simulate.directory import SeedDirectory

ROUNDS = 200
"""Rounds T. Not printed; the default of the authors' code, above every budget of Table 4."""

STAR = "*"

ATTACKS = {5: "same_value", 6: "scaled_flip", 7: "gaussian", 8: "data_poison"}
"""Attack of each robustness table."""

SHARES = {5: (10, 20, 50, 80), 6: (10, 20, 50, 80), 7: (10, 20, 50, 80), 8: (2, 5, 10, 20)}
"""Per cent of Byzantine clients in each robustness table."""


@dataclass(frozen=True)
class Task:
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
    "synthetic00": Task("Synthetic(0, 0)", _synthetic(0.0), "multinomial", 100, 10, 21, 328020, 0.6),
    "synthetic11": Task("Synthetic(1, 1)", _synthetic(1.0), "multinomial", 100, 10, 21, 401940, 0.6),
    "mnist": Task("MNIST", _images("mnist", 2, "equal"), "mnist-mlp", 100, 20, 50, 228000, 0.7),
    "fashion": Task(
        "FashionMNIST", _images("fashion_mnist", 2, "random"), "fashion-resnet", 100, 20, 600, 3384000, 0.7, 2
    ),
    "cifar": Task(
        "CIFAR", _images("cifar10", 2, "random"), "cifar-cnn", 200, 20, 60, 1029600, 0.4, 2, subset=True
    ),
    "emnist": Task(
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
        {"name": "per_fedavg", "preset": "reference"}, grid={"lr": _LR, "personal_lr": _PERSONAL}
    ),
    "FedAvg": Method({"name": "fedavg"}, grid=_STEPS),
    "Local": Method({"name": "local"}, grid={"lr": _LR}),
    "Local, 20 steps": Method({"name": "local", "steps": 20, "clip_gradients": 60.0}, grid={"lr": _PERSONAL}),
    "Local, 100 steps": Method(
        {"name": "local", "steps": 100, "clip_gradients": 60.0}, grid={"lr": _PERSONAL}
    ),
    "lp-proj-1": Method({"name": "lp_proj", "p": 1, "preset": "reference"}, grid=_BILEVEL),
    "lp-proj-2": Method({"name": "lp_proj", "p": 2, "preset": "reference"}, grid=_BILEVEL),
    "lp-proj-1, R = 5": Method({"name": "lp_proj", "p": 1, "preset": "reference"}, grid=_BILEVEL),
    "lp-proj-2, R = 5": Method({"name": "lp_proj", "p": 2, "preset": "reference"}, grid=_BILEVEL),
    "RSA": Method({"name": "rsa"}, grid=_BILEVEL),
    "LG-FedAvg": Method({"name": "lg_fedavg"}, grid=_STEPS),
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
    4: ("FedAvg", "Sketch", "lp-proj-1", "lp-proj-2", "LG-FedAvg", "LBGM", "QSGD", "DGC"),
    **dict.fromkeys(
        (5, 6, 7, 8),
        ("Ditto", "Global+Mean", "Global+Median", "Global+Krum", "RSA", "lp-proj-1", "lp-proj-2"),
    ),
}
"""Methods of each table. LG-FedAvg needs more than one layer: not on Synthetic."""

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

CHOSEN = {name: _SYNTHETIC if name.startswith("synthetic") else _IMAGES for name in TASKS}
"""The grid point each method runs with.

Synthetic: by validation accuracy of `tune` on Synthetic(0, 0), seed 101, 100 rounds, with R = 1 for methods
with an inner solve. Image sets: from the middle of the grid, not tuned.
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

        >>> Point("synthetic00", "lp-proj-1", "same_value", 80).config().federation.byzantine
        80
        """
        task, method = lookup(TASKS, self.task, "data set"), lookup(METHODS, self.method, "method")
        liars = round(task.clients * self.percent / 100)
        algorithm = {**method.algorithm, **(CHOSEN[self.task][self.method] if choice is None else choice)}
        if algorithm["name"] == "lp_proj":
            algorithm["dim"] = task.dim
        if algorithm["name"] == "lg_fedavg":
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
    (35, 13)
    """
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


@dataclass(frozen=True)
class Curve:
    """One seed of a point, round by round: accuracy, its variance over clients, scalars and bytes so far."""

    accuracy: list[float]
    variance: list[float]
    scalars: list[float]
    bytes: list[float]
    diverged: int | None = None

    @staticmethod
    def read(records: Sequence[Mapping[str, Any]], diverged: int | None) -> Curve:
        """Read the records of a run directory; rounds that were not evaluated keep the last value."""
        curve = Curve([], [], [], [], diverged)
        accuracy, variance, scalars, sent = math.nan, math.nan, 0.0, 0.0
        for record in records:
            if record["accuracy"] is not None:
                accuracy, variance = record["accuracy"], record.get("variance", math.nan)
            scalars += record["up_scalars"] + record["down_scalars"]
            sent += record["up_bytes"] + record["down_bytes"]
            for values, value in zip(
                (curve.accuracy, curve.variance, curve.scalars, curve.bytes),
                (accuracy, variance, scalars, sent),
                strict=True,
            ):
                values.append(value)
        return curve

    def within(self, budget: float) -> float | None:
        """Return the accuracy after the last round that fits the budget in scalars; None if none does."""
        fitting = [a for a, spent in zip(self.accuracy, self.scalars, strict=True) if spent <= budget]
        return fitting[-1] if fitting else None

    def until(self, target: float) -> tuple[float, float] | None:
        """Return the scalars and bytes spent when the accuracy first reached the target; None if never."""
        for reached, scalars, sent in zip(self.accuracy, self.scalars, self.bytes, strict=True):
            if reached >= target:
                return scalars, sent
        return None


def curves(point: Point, out: Path) -> list[Curve]:
    """Read what is there of a point, one curve per finished seed."""
    folder = out / point.folder
    if not (folder / "summary.json").exists():
        return []
    directory = simulate.RunDirectory.open(folder)
    summary = json.loads((folder / "summary.json").read_text())
    return [
        Curve.read(directory.seed(seed).records(), summary["diverged"].get(str(seed)))
        for seed in directory.config.run.seeds
    ]


def train_losses(point: Point, out: Path) -> list[tuple[float, float]]:
    """Return the final mean training loss and its variance over clients, for every seed that has them.

    They are computed once, from the final checkpoints, and kept in train.json beside them.
    """
    kept = out / point.folder / "train.json"
    if not kept.exists():
        directory = simulate.RunDirectory.open(out / point.folder)
        folders = {seed: directory.seed(seed) for seed in directory.config.run.seeds}
        found = [_train_loss(directory.config, seed, f) for seed, f in folders.items() if f.finished]
        kept.write_text(json.dumps(found))
    return [(loss, variance) for loss, variance in json.loads(kept.read_text())]


def _train_loss(settings: Config, seed: int, folder: SeedDirectory) -> tuple[float, float]:
    experiment = simulate.assemble(settings, seed)
    progress = folder.restore(experiment.device)
    if progress is None:
        raise ConfigError(f"{str(folder.path)!r} is finished but has no checkpoint; remove it and run again")
    score = _score(experiment, progress, "train")
    loss, count = score.loss.double(), score.examples.double()
    return float((loss * count).sum() / count.sum()), float(loss.var(unbiased=False))


def _score(experiment: simulate.Experiment, progress: simulate.Progress, split: data.Split) -> models.Score:
    """Score the honest clients' models on one split of their own data."""
    clients = experiment.clients
    rows = [row for row, i in enumerate(clients.ids) if i not in experiment.byzantine]
    params = simulate.latest_model(experiment, progress)
    held = clients.data.everything([clients.ids[row] for row in rows], split)
    buffers = {name: progress.clients[name][rows] for name, _ in clients.model.buffers}
    own = params[rows] if params.dim() == 2 else params
    return models.evaluate(clients.model, own, held.x, held.y, held.weight, buffers=buffers or None)


def cell(values: Sequence[float | None], digits: int = 4) -> str:
    """Write mean ± sample standard deviation; a star with the count where some values are missing.

    >>> cell([0.5, 0.7]), cell([None, None]), cell([0.5, None])
    ('0.6000 ± 0.1414', '*', '0.5000 ± 0.0000 (1 of 2)')
    """
    present = [value for value in values if value is not None]
    if not present:
        return STAR
    mean = math.fsum(present) / len(present)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in present) / max(1, len(present) - 1))
    note = "" if len(present) == len(values) else f" ({len(present)} of {len(values)})"
    return f"{mean:.{digits}f} ± {spread:.{digits}f}{note}"


def _final(curve: Curve, quantity: str) -> float | None:
    return None if curve.diverged is not None else getattr(curve, quantity)[-1]


def _starred(found: Sequence[Curve]) -> str:
    """Write accuracy (variance), or a star with the rounds in which seeds diverged."""
    if not found:
        return ""
    lost = [curve.diverged for curve in found if curve.diverged is not None]
    kept = [curve for curve in found if curve.diverged is None]
    rounds = f"{min(lost)}–{max(lost)}" if lost else ""
    if not kept:
        return f"{STAR} ({rounds})"
    text = cell([curve.accuracy[-1] for curve in kept], 3)
    text += f" ({math.fsum(c.variance[-1] for c in kept) / len(kept):.3f})"
    return text + (f"; {len(lost)} of {len(found)} {STAR} ({rounds})" if lost else "")


def compare(task: str, table: int, out: Path) -> str:
    """Return a Markdown table of ours beside the paper's, for the points that were run."""
    methods = [p.method for p in points(task, table) if not p.percent]
    if table == 3:
        head = ["method", "train loss", "paper", "test accuracy", "paper", "variance", "paper"]
        rows = [_row3(task, method, out) for method in methods]
    elif table == 4:
        head = [
            "method", "accuracy in budget", "paper", "scalars to target", "paper", "bytes to target",
        ]  # fmt: skip
        rows = [_row4(task, method, out) for method in methods]
    else:
        shares = (0, *SHARES[table])
        head = ["method", *itertools.chain(*([f"{s} %" if s else "clean", "paper"] for s in shares))]
        rows = [_row5(table, task, method, out) for method in methods]
    lines = [head, ["---"] * len(head), *(row for row in rows if any(row[1:]))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row3(task: str, method: str, out: Path) -> list[str]:
    point = Point(task, method)
    found, paper = curves(point, out), printed(3, task, method) or [""] * 4
    if not found:
        return [method] + [""] * 6
    losses = train_losses(point, out)
    return [
        method,
        cell([loss for loss, _ in losses]),
        paper[0],
        cell([_final(curve, "accuracy") for curve in found]),
        paper[2],
        cell([_final(curve, "variance") for curve in found]),
        paper[3],
    ]


def _row4(task: str, method: str, out: Path) -> list[str]:
    settings = TASKS[task]
    found, paper = curves(Point(task, method), out), printed(4, task, method) or [""] * 2
    if not found:
        return [method] + [""] * 5
    spent = [curve.until(settings.target) for curve in found]
    return [
        method,
        cell([curve.within(settings.budget) for curve in found], 3),
        paper[0],
        cell([None if pair is None else pair[0] for pair in spent], 0),
        paper[1],
        cell([None if pair is None else pair[1] for pair in spent], 0),
    ]


def _row5(table: int, task: str, method: str, out: Path) -> list[str]:
    paper = printed(table, task, method) or [""] * 5
    columns = [Point(task, method), *(Point(task, method, ATTACKS[table], s) for s in SHARES[table])]
    cells = [[_starred(curves(point, out)), theirs] for point, theirs in zip(columns, paper, strict=True)]
    return [method, *itertools.chain(*cells)]


def validation_accuracy(settings: Config, seed: int) -> float:
    """Run one seed without writing anything; return the accuracy on the clients' validation examples."""
    experiment = simulate.assemble(settings, seed)
    progress = simulate.start(experiment)
    try:
        while progress.round < settings.run.rounds:
            progress, _ = simulate.step(experiment, progress)
    except simulate.Diverged:
        return 0.0
    score = _score(experiment, progress, "valid")
    return float(score.correct.sum() / score.examples.sum())


def _tried(job: tuple[Point, dict[str, Any], int, int]) -> tuple[float, dict[str, Any]]:
    point, choice, rounds, seed = job
    torch.set_num_threads(1)
    return validation_accuracy(point.config(rounds, (seed,), choice), seed), choice


def _ran(job: tuple[Point, Path, int, tuple[int, ...]]) -> str:
    point, out, rounds, seeds = job
    torch.set_num_threads(1)
    summary = simulate.run_or_resume(point.config(rounds, seeds), out / point.folder)
    if not point.percent:
        train_losses(point, out)
    return f"{point.folder}: {summary.accuracy.mean} ± {summary.accuracy.std}, diverged {summary.diverged}"


app = typer.Typer(add_completion=False, help="The experiments of lp-proj.")
Out = Annotated[Path, typer.Option(help="directory of the runs")]
Processes = Annotated[int, typer.Option(help="points run at the same time, one thread each")]


@app.command()
def run(
    task: str,
    out: Out,
    table: int = 3,
    rounds: int = ROUNDS,
    seeds: str = "1-5",
    processes: Processes = 1,
    only: Annotated[str, typer.Option(help="methods, separated by semicolons")] = "",
) -> None:
    """Run the points of a table; points that are finished are not run again."""
    wanted = [name.strip() for name in only.split(";") if name.strip()]
    chosen = [p for p in points(task, table) if not wanted or p.method in wanted]
    jobs = [(point, out, rounds, config.parse_seeds(seeds)) for point in chosen]
    with ProcessPoolExecutor(processes) as pool:
        for line in pool.map(_ran, jobs):
            typer.echo(line)


@app.command(name="compare")
def compare_command(task: str, out: Out, table: int = 3) -> None:
    """Print ours beside the paper's, as Markdown."""
    typer.echo(compare(task, table, out))


@app.command()
def tune(task: str, method: str, rounds: int = 60, seed: int = 101, processes: Processes = 1) -> None:
    """Try the paper's grid on one seed; print validation accuracies, best first."""
    point = Point(task, method)
    jobs = [(point, choice, rounds, seed) for choice in lookup(METHODS, method, "method").choices()]
    with ProcessPoolExecutor(processes) as pool:
        tried = sorted(pool.map(_tried, jobs), key=lambda pair: -pair[0])
    for accuracy, choice in tried:
        typer.echo(f"{accuracy:.4f}  {choice}")


if __name__ == "__main__":
    app()
