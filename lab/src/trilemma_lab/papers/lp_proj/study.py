"""lp-proj's tables and figures as studies, one for each data set: its points in the tables they stand in.

Figure 5 is Table 3's runs round by round, Figure 6 its accuracies against their variance over clients; both
are drawn from what is measured here (`trilemma_lab.papers.lp_proj.pictures`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from trilemma.base.records import Record, Spread
from trilemma.experiment import parse_seeds
from trilemma.report import Result
from trilemma_lab.papers.lp_proj.grid import TASKS, points
from trilemma_lab.papers.lp_proj.methods import TABLES
from trilemma_lab.papers.lp_proj.pictures import draw
from trilemma_lab.papers.lp_proj.results import Reached, curves_in, train_losses_in
from trilemma_lab.studies.grid import Place
from trilemma_lab.studies.study import Study, studies

CURVE = (1, 2, 5, 10, 20, 50, 100, 150, 200)
"""Rounds of Figure 5's curves."""

REPORTED = {
    "Figure 5": tuple(f"{name}@{t}" for name in ("train_loss", "accuracy") for t in CURVE),
    "Table 3": ("train_loss", "train_loss_variance", "accuracy", "variance", "worst_tenth"),
    "Table 4": ("accuracy_in_budget", "scalars_to_target"),
    **{f"Table {number}": ("accuracy", "variance") for number in (5, 6, 7, 8)},
}
"""What each table says of a run."""


def places(seeds: str, task: str) -> list[Place]:
    """Return the points of all tables; a run without attack stands in each of them."""
    numbers = parse_seeds(seeds)
    tables = {f"Table {table}": points(task, table) for table in TABLES} | {"Figure 5": points(task, 3)}
    configs = {point: point.config(seeds=numbers) for found in tables.values() for point in found}
    return [
        Place(table, point.method, f"{point.percent} %" if point.percent else "clean", configs[point])
        for table, found in tables.items()
        for point in found
    ]


def measure(result: Result, task: str) -> Mapping[str, Spread]:
    """Return what the tables report of a run; without liars also training losses, costs and curves."""
    seeds = result.config.run.seeds
    curves = curves_in(result.directory)
    reached = [curve.result() for curve in curves]
    found: dict[str, Sequence[float | None]] = {
        "accuracy": [one and one.accuracy for one in reached],
        "variance": [one and one.variance for one in reached],
        "worst_tenth": [one and one.worst_tenth for one in reached],
    }
    if not result.config.federation.byzantine:
        spent = [curve.until(TASKS[task].target) for curve in curves]
        found["accuracy_in_budget"] = [curve.within(TASKS[task].budget) for curve in curves]
        found["scalars_to_target"] = [None if pair is None else pair[0] for pair in spent]
        losses = train_losses_in(result.directory)
        if len(losses) == len(seeds):
            found["train_loss"] = [loss for loss, _ in losses]
            found["train_loss_variance"] = [variance for _, variance in losses]
        for t in CURVE:
            found[f"accuracy@{t}"] = [_at(curve.reached, t) for curve in curves]
            found[f"train_loss@{t}"] = [_loss(result.seeds[seed], t) for seed in seeds]
    return {name: Spread.of(dict(zip(seeds, values, strict=True))) for name, values in found.items()}


def _at(reached: Sequence[Reached], round_: int) -> float | None:
    return round(reached[round_ - 1].accuracy, 6) if round_ <= len(reached) else None


def _loss(records: Sequence[Record], round_: int) -> float | None:
    loss = records[round_ - 1].train_loss if round_ <= len(records) else None
    return None if loss is None else round(loss, 6)


SHORT: Mapping[str, tuple[int, tuple[str, ...]]] = dict.fromkeys(
    TASKS, (20, ("lp-proj-1", "lp-proj-2", "FedAvg", "Local, 20 steps"))
) | {
    "emnist": (10, ("lp-proj-1", "lp-proj-2", "FedAvg", "Local, 20 steps")),
    "cifar": (5, ("lp-proj-1", "lp-proj-2", "FedAvg", "Local, 20 steps")),
    "fashion": (2, ("FedAvg", "Local")),
}
"""Rounds and rows of a quick look, so that all of them together take a CPU minutes: a round of lp-proj on
FashionMNIST trains a hundred ResNets."""


def _kept(place: Place, rows: tuple[str, ...]) -> bool:
    return place.table == "Table 3" and place.row in rows


for _task, _benchmark in TASKS.items():
    _rounds, _rows = SHORT[_task]
    studies.register(f"lp-proj-{_task}", f"lp-proj, Tables 3 to 8, Figures 5 and 6 on {_benchmark.title}")(
        Study(
            paper="lp-proj",
            figures="Tables 3 to 8, Figures 5 and 6",
            places=partial(places, task=_task),
            left_out=f"all but Table 3 of {'; '.join(_rows)}; rounds after {_rounds}; seeds 2 to 5",
            kept=partial(_kept, rows=_rows),
            shorter=(f"run.rounds={_rounds}",),
            seeds="1-5",
            measure=partial(measure, task=_task),
            reported=REPORTED,
            draw=draw,
        )
    )
