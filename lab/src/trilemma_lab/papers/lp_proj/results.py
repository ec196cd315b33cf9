"""What runs of the grid gave: curves, costs, training losses, validation accuracies."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trilemma import data, models, simulate
from trilemma.base import files
from trilemma.base.records import Record
from trilemma.experiment import Config
from trilemma.learning.protocol import State
from trilemma.report.run_metadata import written_summary
from trilemma.simulate.directory import SeedDirectory
from trilemma_lab.papers.lp_proj.grid import GridPoint, lookup
from trilemma_lab.papers.lp_proj.methods import METHODS


class Reached(NamedTuple):
    """What honest clients' models reach: accuracy, its variance over clients, the worst tenth's accuracy."""

    accuracy: float
    variance: float
    worst_tenth: float


NOTHING = Reached(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class SeedCurve:
    """One seed of a point, round by round: what was reached, scalars and bytes sent so far."""

    reached: list[Reached]
    scalars: list[float]
    bytes: list[float]
    diverged: int | None = None

    @staticmethod
    def read(records: Sequence[Record], diverged: int | None) -> SeedCurve:
        """Read the records of a run directory; rounds that were not evaluated keep the last value."""
        curve = SeedCurve([], [], [], diverged)
        reached, scalars, sent = NOTHING, 0.0, 0.0
        for record in records:
            if record.metrics:
                scores = (record.metrics.get(name) for name in Reached._fields)
                reached = Reached(*(math.nan if score is None else score for score in scores))
            scalars += record.facts["up_scalars"] + record.facts["down_scalars"]
            sent += record.facts["up_bytes"] + record.facts["down_bytes"]
            curve.reached.append(reached)
            curve.scalars.append(scalars)
            curve.bytes.append(sent)
        return curve

    def result(self, best: bool = False) -> Reached | None:
        """Return what the last round reached, or the best one; None if the run diverged.

        >>> reached = [Reached(0.9, 0.0, 0.8), Reached(0.1, 0.3, 0.0)]
        >>> SeedCurve(reached, [1.0, 2.0], [4.0, 8.0]).result(best=True)
        Reached(accuracy=0.9, variance=0.0, worst_tenth=0.8)
        """
        if self.diverged is not None:
            return None
        return max(self.reached, key=lambda reached: reached.accuracy) if best else self.reached[-1]

    def within(self, budget: float) -> float | None:
        """Return the accuracy after the last round that fits the budget in scalars; None if none does."""
        fitting = [r.accuracy for r, spent in zip(self.reached, self.scalars, strict=True) if spent <= budget]
        return fitting[-1] if fitting else None

    def until(self, target: float) -> tuple[float, float] | None:
        """Return the scalars and bytes spent when the accuracy first reached the target; None if never."""
        for reached, scalars, sent in zip(self.reached, self.scalars, self.bytes, strict=True):
            if reached.accuracy >= target:
                return scalars, sent
        return None


def curves_in(folder: Path) -> list[SeedCurve]:
    """Read what is there of a run, one curve per finished seed."""
    summary = written_summary(folder)
    if summary is None:
        return []
    directory = simulate.RunDirectory.open(folder)
    return [
        SeedCurve.read(directory.seed(seed).records(), summary.diverged.get(str(seed)))
        for seed in directory.config.run.seeds
    ]


def train_losses_in(folder: Path) -> list[tuple[float, float]]:
    """Return the final mean training loss and its variance over clients, for every finished seed of a run.

    They are computed once, from the returned models, and kept in train.json beside them.
    """
    kept = folder / "train.json"
    if not kept.exists():
        directory = simulate.RunDirectory.open(folder)
        folders = {seed: directory.seed(seed) for seed in directory.config.run.seeds}
        found = [_train_loss(directory.config, seed, f) for seed, f in folders.items() if f.finished]
        files.write_atomically(kept, json.dumps(found).encode())
    with files.readable(kept, "training losses"):
        return [(float(loss), float(variance)) for loss, variance in json.loads(kept.read_text("utf-8"))]


def _train_loss(settings: Config, seed: int, folder: SeedDirectory) -> tuple[float, float]:
    experiment = simulate.assemble(settings, seed)
    progress = folder.checkpoint(experiment.device)
    params = folder.model().to(experiment.device)
    score = _score(experiment, params, {} if progress is None else progress.clients, "train")
    loss, count = score.loss.double(), score.examples.double()
    return float((loss * count).sum() / count.sum()), float(loss.var(unbiased=False))


def _score(experiment: simulate.Experiment, params: Tensor, state: State, split: data.Split) -> models.Score:
    """Score the honest clients' models on one split of their own data."""
    clients = experiment.clients
    rows = [row for row, i in enumerate(clients.ids) if i not in experiment.byzantine]
    held = clients.data.everything([clients.ids[row] for row in rows], split)
    buffers = {name: state[name][rows] for name, _ in clients.model.buffers}
    own = params[rows] if params.dim() == 2 else params
    return models.evaluate(clients.model, own, held.x, held.y, held.weight, buffers=buffers or None)


def validation_accuracy(settings: Config, seed: int) -> float:
    """Run one seed without writing anything; return the accuracy on the clients' validation examples."""
    experiment = simulate.assemble(settings, seed)
    progress = simulate.start(experiment)
    try:
        while progress.round < settings.run.rounds:
            progress, _ = simulate.step(experiment, progress)
    except simulate.Diverged:
        return 0.0
    score = _score(experiment, simulate.latest_model(experiment, progress), progress.clients, "valid")
    return float(score.correct.sum() / score.examples.sum())


def tried(task: str, method: str, rounds: int, seed: int) -> list[tuple[float, dict[str, Any]]]:
    """Run a method at every point of its grid; return validation accuracies and choices, best first."""
    point = GridPoint(task, method)
    choices = lookup(METHODS, method, "method").choices()
    found = [(validation_accuracy(point.config(rounds, (seed,), choice), seed), choice) for choice in choices]
    return sorted(found, key=lambda pair: -pair[0])
