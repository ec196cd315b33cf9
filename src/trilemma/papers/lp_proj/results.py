"""What runs of the grid gave: curves, costs, training losses, and tables beside the paper's numbers."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from trilemma import data, models, simulate
from trilemma.config import Config
from trilemma.learning.protocol import State
from trilemma.papers.lp_proj.grid import ATTACKS, SHARES, TASKS, Point, points, printed
from trilemma.papers.lp_proj.methods import TABLES
from trilemma.records import Record
from trilemma.report import Table
from trilemma.simulate.directory import SeedDirectory

STAR = "*"


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


def curves(point: Point, out: Path) -> list[SeedCurve]:
    """Read what is there of a point, one curve per finished seed."""
    return curves_in(out / point.folder)


def curves_in(folder: Path) -> list[SeedCurve]:
    """Read what is there of a run, one curve per finished seed."""
    if not (folder / "summary.json").exists():
        return []
    directory = simulate.RunDirectory.open(folder)
    summary = json.loads((folder / "summary.json").read_text())
    return [
        SeedCurve.read(directory.seed(seed).records(), summary["diverged"].get(str(seed)))
        for seed in directory.config.run.seeds
    ]


def train_losses(point: Point, out: Path) -> list[tuple[float, float]]:
    """Return the final mean training loss and its variance over clients, for every seed that has them.

    They are computed once, from the returned models, and kept in train.json beside them.
    """
    return train_losses_in(out / point.folder)


def train_losses_in(folder: Path) -> list[tuple[float, float]]:
    """Return the same for the run in `folder`."""
    kept = folder / "train.json"
    if not kept.exists():
        directory = simulate.RunDirectory.open(folder)
        folders = {seed: directory.seed(seed) for seed in directory.config.run.seeds}
        found = [_train_loss(directory.config, seed, f) for seed, f in folders.items() if f.finished]
        kept.write_text(json.dumps(found))
    return [(loss, variance) for loss, variance in json.loads(kept.read_text())]


def _train_loss(settings: Config, seed: int, folder: SeedDirectory) -> tuple[float, float]:
    experiment = simulate.assemble(settings, seed)
    progress = folder.restore(experiment.device) if folder.checkpoint_path.exists() else None
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


def _starred(found: Sequence[SeedCurve], best: bool) -> str:
    """Write accuracy (variance), or a star with the rounds in which seeds diverged."""
    if not found:
        return ""
    lost = sorted({curve.diverged for curve in found if curve.diverged is not None})
    kept = [result for curve in found if (result := curve.result(best)) is not None]
    rounds = "–".join(str(round_) for round_ in dict.fromkeys((lost[0], lost[-1]))) if lost else ""
    if not kept:
        return f"{STAR} ({rounds})"
    text = cell([result.accuracy for result in kept], 3)
    text += f" ({math.fsum(result.variance for result in kept) / len(kept):.3f})"
    return text + (f"; {len(found) - len(kept)} of {len(found)} {STAR} ({rounds})" if lost else "")


def compare(task: str, table: int, out: Path, best: bool = False) -> str:
    """Return a Markdown table of ours beside the paper's: rows and shares of which something was run.

    Accuracies are the last round's, in Tables 5 to 8 on request each seed's best.
    """
    methods = [p.method for p in points(task, table) if not p.percent]
    if table == 3:
        head = ["method", "train loss", "paper", "test accuracy", "paper", "variance", "paper", "worst tenth"]
        rows = [_row3(task, method, out) for method in methods]
    elif table == 4:
        head = [
            "method", "accuracy in budget", "paper", "scalars to target", "paper", "bytes to target",
        ]  # fmt: skip
        rows = [_row4(task, method, out) for method in methods]
    else:
        shares = [s for s in (0, *SHARES[table]) if any(_found(table, task, m, s, out) for m in methods)]
        head = ["method", *itertools.chain(*([f"{s} %" if s else "clean", "paper"] for s in shares))]
        rows = [_row5(table, task, method, shares, out, best) for method in methods]
    ours = [row for row in rows if any(row[1::2])]  # the paper's columns are the others
    return _markdown(head, ours)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = tuple(tuple(cell.replace(f"{STAR}/{STAR}", STAR) for cell in row) for row in rows)
    return Table("", tuple(head), cells, words=len(head)).markdown()


def _row3(task: str, method: str, out: Path) -> list[str]:
    point = Point(task, method)
    found, paper = curves(point, out), printed(3, task, method) or [""] * 4
    if not found:
        return [method] + [""] * 7
    losses, results = train_losses(point, out), [curve.result() for curve in found]
    return [
        method,
        cell([loss for loss, _ in losses]),
        paper[0],
        cell([result and result.accuracy for result in results]),
        paper[2],
        cell([result and result.variance for result in results]),
        paper[3],
        cell([result and result.worst_tenth for result in results], 3),
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


def _found(table: int, task: str, method: str, share: int, out: Path) -> list[SeedCurve]:
    return curves(Point(task, method, ATTACKS[table], share) if share else Point(task, method), out)


def _row5(table: int, task: str, method: str, shares: Sequence[int], out: Path, best: bool) -> list[str]:
    paper = dict(zip((0, *SHARES[table]), printed(table, task, method) or [""] * 5, strict=True))
    cells = [[_starred(_found(table, task, method, share, out), best), paper[share]] for share in shares]
    return [method, *itertools.chain(*cells)]


def distances(tasks: Sequence[str], out: Path) -> str:
    """Return how far ours are from the paper's robustness tables, with our last rounds and with our best.

    Each cell: the mean over the attacked cells of |ours − paper| and, in brackets, of ours − paper; for the
    last round, then for the best. Cells that either stars, in part or whole, are left out.
    """
    methods = [method for method in TABLES[5] if all(printed(5, task, method) for task in tasks)]
    head = ["method", *itertools.chain(*([f"Table {t}, last", "best"] for t in ATTACKS))]
    rows = [
        [method, *(_distance(table, tasks, method, best, out) for table in ATTACKS for best in (False, True))]
        for method in methods
    ]
    return _markdown(head, [row for row in rows if any(row[1:])])


def _distance(table: int, tasks: Sequence[str], method: str, best: bool, out: Path) -> str:
    gaps = []
    for task in tasks:
        for share, text in zip(SHARES[table], printed(table, task, method)[1:], strict=True):
            results = [curve.result(best) for curve in _found(table, task, method, share, out)]
            kept = [result.accuracy for result in results if result is not None]
            if kept and len(kept) == len(results) and not text.startswith(STAR):
                gaps.append(math.fsum(kept) / len(kept) - float(text.split("/")[0]))
    if not gaps:
        return ""
    count = len(gaps)
    return f"{math.fsum(map(abs, gaps)) / count:.3f} ({math.fsum(gaps) / count:+.3f})"


def plot_fairness(task: str, out: Path, picture: Path) -> None:
    """Draw two measures of fairness over accuracy, one point per method of Table 3 that was run."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    (left, right), markers = figure.subplots(1, 2), itertools.cycle("osD^v<>PX*hp")
    for number, method in enumerate(point.method for point in points(task, 3)):
        found = (curve.result() for curve in curves(Point(task, method), out))
        kept = [result for result in found if result is not None]
        if kept:
            mean = Reached(*(math.fsum(values) / len(kept) for values in zip(*kept, strict=True)))
            shown = {"marker": next(markers), "color": colormaps["tab20"](number), "alpha": 0.8, "ls": "none"}
            left.plot(mean.accuracy, mean.variance, label=method, **shown)
            right.plot(mean.accuracy, mean.worst_tenth, **shown)
    left.set(xlabel="test accuracy", ylabel="variance over clients", yscale="log", title="lower is fairer")
    right.set(xlabel="test accuracy", ylabel="accuracy of the worst tenth", title="higher is fairer")
    figure.suptitle(TASKS[task].title)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(picture, dpi=130)


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
