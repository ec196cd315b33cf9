"""lp-proj's tables as studies, one for each data set: its points in the tables they stand in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from trilemma.config import parse_seeds
from trilemma.papers.grid import Place
from trilemma.papers.lp_proj.grid import ROUNDS, TASKS, points
from trilemma.papers.lp_proj.methods import TABLES
from trilemma.papers.lp_proj.results import curves_in, train_losses_in
from trilemma.papers.study import Study, studies
from trilemma.records import Spread
from trilemma.report import Result


def places(seeds: str, task: str) -> list[Place]:
    """Return the points of all tables; a run without attack stands in each of them."""
    numbers = parse_seeds(seeds)
    configs = {point: point.config(ROUNDS, numbers) for table in TABLES for point in points(task, table)}
    return [
        Place(
            f"Table {table}", point.method, f"{point.percent} %" if point.percent else "clean", configs[point]
        )
        for table in TABLES
        for point in points(task, table)
    ]


def measure(result: Result, task: str) -> Mapping[str, Spread]:
    """Return what the tables report of a run; without liars also training losses and costs."""
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
    return {name: Spread.of(dict(zip(seeds, values, strict=True))) for name, values in found.items()}


SHORT = ("lp-proj-1", "lp-proj-2", "FedAvg", "Local, 20 steps")

for _task, _benchmark in TASKS.items():
    studies.register(f"lp-proj-{_task}", f"lp-proj, Tables 3 to 8 on {_benchmark.title}")(
        Study(
            paper="lp-proj",
            figures="Tables 3 to 8",
            places=partial(places, task=_task),
            left_out=f"all but Table 3 of {', '.join(SHORT)}; 180 of 200 rounds; seeds 2 to 5",
            kept=lambda place: place.table == "Table 3" and place.row in SHORT,
            shorter=("run.rounds=20",),
            seeds="1-5",
            measure=partial(measure, task=_task),
        )
    )
