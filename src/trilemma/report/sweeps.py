"""What a sweep gave: the results of its cells, one row for each cell and seed, and tables across them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from trilemma.base.errors import UserError, nearest
from trilemma.base.records import Spread, Summary
from trilemma.experiment.sweep import ABSENT, leaves, value_at, worded
from trilemma.report.cross_table import Cross, TableSquare
from trilemma.report.loading import load_cell
from trilemma.report.result import Result
from trilemma.report.tables import tightest_epsilon
from trilemma.simulate.sweep import Failure, failures, finished, known_cells
from trilemma.task.metrics import LOWER_IS_BETTER

Value = Literal["worst", "mean", "best"]
"""What a table shows where several cells share a row and a column."""


@dataclass(frozen=True)
class SweepResult:
    """The results of the finished cells of a sweep by name; `unfinished` and `failed` have none.

    `values` are what the swept keys are in each cell. A folder of run directories will do as well: its keys
    are those in which the runs' configurations differ.
    """

    directory: Path
    results: Mapping[str, Result] = field(repr=False)
    values: Mapping[str, Mapping[str, Any]] = field(repr=False)
    unfinished: tuple[str, ...] = ()
    failed: Mapping[str, Failure] = field(default_factory=dict)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys that were swept."""
        return tuple(dict.fromkeys(key for values in self.values.values() for key in values))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that runs were scored by, the loss last."""
        names = dict.fromkeys(name for result in self.results.values() for name in result.summary.metrics)
        return (*names, "loss")

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per cell and seed: its swept values, scores, ε, and whether it diverged."""
        return [row for name, result in self.results.items() for row in self._rows(name, result)]

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise UserError("to_pandas needs pandas: pip install pandas; rows() needs nothing") from None
        return pandas.DataFrame(self.rows())

    def cross(
        self, rows: str, columns: str | None = None, value: Value = "mean", metric: str | None = None
    ) -> Cross:
        """Lay a metric out by the values of two keys of the configurations, or of one.

        Where several cells share a row and a column, `mean` takes all their seeds together; `worst` and
        `best` take the cell whose mean over seeds is that.
        """
        if value not in get_args(Value):
            raise UserError(f"value = {value!r}; allowed: {', '.join(get_args(Value))}")
        wanted = self.metrics[0] if metric is None else metric
        if wanted not in self.metrics:
            raise UserError(f"no run was scored by {wanted!r}: {nearest(wanted, self.metrics)}")
        for key in (rows, *([] if columns is None else [columns])):
            if all(value_at(result.config, key) == ABSENT for result in self.results.values()):
                raise UserError(f"no run has the key {key!r}: {nearest(key, self.keys)}")
        shared: dict[tuple[str, str], list[Summary]] = {}
        for result in self.results.values():
            column = "" if columns is None else worded(value_at(result.config, columns))
            place = worded(value_at(result.config, rows)), column
            shared.setdefault(place, []).append(result.summary)
        squares = {place: _square(found, value, wanted) for place, found in shared.items()}
        remarks = list(self._remarks())
        unseen = [key for key in self.keys if key not in (rows, columns)]
        if unseen and any(square.cells > 1 for square in squares.values()):
            remarks.append(f"{value} over {', '.join(unseen)}")
        return Cross(rows, columns, value, wanted, squares, (*remarks, *self._without_result()))

    def _rows(self, name: str, result: Result) -> Iterator[dict[str, Any]]:
        """Yield the row of every seed of a cell."""
        summary = result.summary
        spreads = {**summary.metrics, "loss": summary.loss}
        swept = {key: _plain(value_at(result.config, key)) for key in self.keys}
        for seed in summary.loss.per_seed:
            yield {
                "cell": name,
                **swept,
                "seed": int(seed),
                **{metric: spread.per_seed.get(seed) for metric, spread in spreads.items()},
                "epsilon": summary.epsilon.get(summary.accountant),
                "accountant": summary.accountant or None,
                "delta": summary.delta,
                "diverged": summary.diverged.get(seed),
                "rounds": summary.rounds,
            }

    def _remarks(self) -> Iterator[str]:
        """Say what a table of scores leaves out: how many lie, and what was guaranteed."""
        summaries = [result.summary for result in self.results.values()]
        liars = dict.fromkeys(f"{one.byzantine} of {one.clients}" for one in summaries)
        attacks = dict.fromkeys(one.attack for one in summaries)
        yield f"liars: {', '.join(liars)}; attack: {', '.join(attacks)}"
        meanings = dict.fromkeys(tightest_epsilon(one)[1] or "ε = ∞" for one in summaries)
        yield from list(meanings)[:3]
        if len(meanings) > 3:
            yield f"and {len(meanings) - 3} more ε (see to_pandas())"

    def _without_result(self) -> Iterator[str]:
        """Say which cells have no result, and why."""
        if self.unfinished:
            yield f"{len(self.unfinished)} cells are not finished"
        for failure in self.failed.values():
            first, *_ = failure.reason.splitlines() or ["the reason is not on record"]
            yield f"no result: {first}"


def load_sweep(directory: Path | str) -> SweepResult:
    """Read the results below a folder: of a sweep, or of any runs whose directories are in it."""
    folder = Path(directory)
    if not folder.is_dir():
        raise UserError(f"there is no folder {str(folder)!r}")
    if (folder / "sweep.json").is_file():
        values = known_cells(folder)
        failed = failures(folder)
        done = {name: load_cell(folder / name) for name in values if finished(folder, name)}
        left = tuple(name for name in values if name not in done and name not in failed)
    else:
        failed, left = {}, ()
        done = {path.parent.name: load_cell(path.parent) for path in sorted(folder.glob("*/summary.json"))}
        values = _differences(done)
    if not done:
        itself = " below it: it is a run itself" if (folder / "summary.json").is_file() else ""
        raise UserError(f"{str(folder)!r} has no finished runs{itself}; allowed: a folder that holds runs")
    return SweepResult(folder, done, values, left, {n: f for n, f in failed.items() if n not in done})


def _square(found: list[Summary], value: Value, metric: str) -> TableSquare:
    """Sum up the cells that share a row and a column."""
    spreads = [one.spread(metric) for one in found if metric == "loss" or metric in one.metrics]
    if value == "mean" or not spreads:
        seeds = [score for spread in spreads for score in spread.per_seed.values()]
        whole = Spread.of(dict(enumerate(seeds)))
    else:
        largest = (metric in LOWER_IS_BETTER) == (value == "worst")
        sign = 1 if largest else -1  # the largest is looked for, or the smallest
        diverged = math.inf if value == "worst" else -math.inf  # worst of all, whatever the metric
        whole = max(spreads, key=lambda one: diverged if one.mean is None else sign * one.mean)
    return TableSquare(whole.mean, whole.std, len(whole.per_seed), len(found))


def _plain(value: Any) -> Any:
    """Return a swept value as it is where it is a number or a name, else in words."""
    return value if isinstance(value, int | float | str) else worded(value)


def _differences(results: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """Return, for each run, the keys in which the configurations differ and what they are in it."""
    flat = {name: dict(leaves(result.config.dump())) for name, result in results.items()}
    keys = dict.fromkeys(key for one in flat.values() for key in one)
    differ = [key for key in keys if len({worded(one.get(key, "")) for one in flat.values()}) > 1]
    return {name: {key: one[key] for key in differ if key in one} for name, one in flat.items()}
