"""Many runs as a table: rows and columns are keys they differ in, the worst run of a cell stands first.

A folder of runs that an installed package knows is laid out as that package has it (`StudyLayout`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Protocol

from trilemma.base.errors import UserError
from trilemma.base.plugins import offered
from trilemma.page.answers import StudyLine, StudySquare, StudyView
from trilemma.page.index import Index, WatchedRun
from trilemma.page.runs import flat, scored
from trilemma.report.run_metadata import RunMetadata
from trilemma.task.metrics import LOWER_IS_BETTER

UNTOLD = frozenset({"run.device", "run.log", "plugins"})
"""Keys that say nothing about what is studied."""


@dataclass(frozen=True)
class StudyPoint:
    """A run of a study: its configuration as text, and where it stands."""

    id: str
    name: str
    folder: PurePosixPath
    config: Mapping[str, str]
    found: RunMetadata


class StudyLayout(Protocol):
    """How runs of a known study are laid out: what an installed package offers in `trilemma.studies`."""

    def paper(self, study: str) -> str:
        """Return the study that a folder of this name holds; "": none that is known."""

    def table(self, study: str, points: Sequence[StudyPoint], remark: str) -> StudyView | None:
        """Return the runs laid out as the paper does; None where none of them is the paper's."""


@cache
def layouts() -> list[StudyLayout]:
    """Return the layouts of installed packages."""
    return [point.load() for point in offered("studies").values()]


def lines(index: Index) -> list[StudyLine]:
    """Return the folders that hold more than one run: those that are watched, and up to two below."""
    return [
        StudyLine(
            id=id_,
            name=id_,
            runs=len(runs),
            changed=max(map(index.changed, runs)) / 1e9,
            paper=next((p for one in layouts() if (p := one.paper(id_))), ""),
        )
        for id_, runs in _groups(index).items()
        if len(runs) > 1
    ]


def view(index: Index, study: str, row: str, column: str, score: str) -> StudyView | None:
    """Return a study as a table; None where there is none of that name."""
    runs = _groups(index).get(study, [])
    if len(runs) < 2:
        return None
    points = [
        StudyPoint(one.id, one.name, PurePosixPath(one.name), flat(found.config), found)
        for one in runs
        if not isinstance(found := index.metadata(one), UserError)
    ]
    broken = len(runs) - len(points)
    remark = f"{broken} of {len(runs)} folders cannot be read" if broken else ""
    if not row:
        for layout in layouts():
            if (table := layout.table(study, points, remark)) is not None:
                return table
    return _table(study, points, row, column, score, remark)


def _groups(index: Index) -> dict[str, list[WatchedRun]]:
    """Return the runs below each watched folder, and below the folders up to two below it, by name."""
    groups: dict[str, list[WatchedRun]] = {}
    for one in index.all("run"):
        parts = PurePosixPath(one.name).parts
        for depth in range(1, min(len(parts), 4)):
            groups.setdefault("/".join(parts[:depth]), []).append(one)
    return dict(sorted(groups.items()))


def keys_of(points: Sequence[StudyPoint]) -> list[str]:
    """Return the keys in which the runs differ, those with the most values first."""
    every = dict.fromkeys(key for point in points for key in point.config if key not in UNTOLD)
    count = {key: len({point.config.get(key, "") for point in points}) for key in every}
    return sorted((key for key in every if count[key] > 1), key=lambda key: -count[key])


def _table(
    study: str, points: Sequence[StudyPoint], row: str, column: str, score: str, remark: str
) -> StudyView:
    """Lay a score of runs out by two keys: those asked for, or else the usual ones."""
    keys = keys_of(points)
    scores = dict.fromkeys(name for point in points for name in point.found.summary.metrics)
    score = score if score in (*scores, "loss") else next(iter(scores), "loss")
    row = row if row in keys else _usual(PREFERRED_ROWS, keys)
    others = [key for key in keys if key != row]
    column = column if column in others else _usual(PREFERRED_COLUMNS, others)
    rows = _values(points, row)
    columns = _values(points, column)
    cells: dict[tuple[str, str], list[StudyPoint]] = {}
    for point in points:
        cells.setdefault((point.config.get(row, ""), point.config.get(column, "")), []).append(point)
    squares = [[square(cells.get((r, c), []), score) for c in columns] for r in rows]
    return StudyView(
        name=study,
        score=score,
        scores=[*dict.fromkeys((*scores, "loss"))],
        low_is_good=score in LOWER_IS_BETTER,
        keys=keys,
        row=row,
        column=column,
        rows=rows,
        columns=columns,
        squares=squares,
        remark=remark,
    )


def _usual(preferred: Sequence[str], keys: Sequence[str]) -> str:
    """Return the first of the preferred keys that is there, or else the first there is."""
    return next((key for key in preferred if key in keys), keys[0] if keys else "")


PREFERRED_ROWS = ("aggregation.rule", "algorithm.name")
PREFERRED_COLUMNS = ("attack.name", "privacy.epsilon", "privacy.noise_multiplier", "federation.byzantine")
"""What rows and columns are where nobody chose, if the runs differ in it."""


def _values(points: Sequence[StudyPoint], key: str) -> list[str]:
    values = {point.config.get(key, "") for point in points}
    return sorted(values, key=_in_order)


def _in_order(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), "")
    except ValueError:
        return (1, 0.0, text)


def square(
    points: Sequence[StudyPoint], score: str, printed: str = "", verdict: str = ""
) -> StudySquare | None:
    """Return a cell: the worst of its runs decides."""
    if not points:
        return None
    finished = [point for point in points if point.found.state in ("finished", "diverged")]
    left = len(points) - len(finished)
    rated = [(value, point) for point in finished if (value := _mean(point, score)) is not None]
    if not rated:
        ids = [point.id for point in points]
        sign = "*" if finished else "not finished"
        return StudySquare(value=None, shown=sign, printed=printed, unfinished=left, worst=ids[0], runs=ids)
    ordered = sorted(rated, key=lambda pair: pair[0], reverse=score in LOWER_IS_BETTER)
    value, worst = ordered[0]
    return StudySquare(
        value=value,
        shown=scored(score, worst.found.summary),
        printed=printed,
        verdict=verdict,
        unfinished=left,
        worst=worst.id,
        runs=[*(point.id for _, point in ordered), *(one.id for one in points if one not in finished)],
        differ=_differing([point for _, point in ordered]),
    )


def _differing(points: Sequence[StudyPoint]) -> list[str]:
    """Return the settings in which the runs of one cell differ: the worst of them is no repetition."""
    every = dict.fromkeys(key for point in points for key in point.config if key not in UNTOLD)
    return [key for key in every if len({point.config.get(key, "") for point in points}) > 1][:3]


def _mean(point: StudyPoint, score: str) -> float | None:
    summary = point.found.summary
    return summary.spread(score).mean if score == "loss" or score in summary.metrics else None
