"""A study as a picture: ours as dots with their spread, or crosses, the paper's as hollow squares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trilemma.base.errors import UserError
from trilemma.report.picture_files import save_picture
from trilemma.report.tables import SHARES
from trilemma_lab.papers.published import Paper
from trilemma_lab.studies.measured import Measured, Results
from trilemma_lab.studies.study import in_order, studies

MANY, ACROSS = 6, 3
"""From `MANY` panels on, `ACROSS` of them stand in a row."""

ROOM = 0.03
"""The part of an axis of shares that is left free below 0 and above 1, so that no mark is cut in two."""

SPREAD = 0.7
"""Marks of one column stand side by side, in the order of their rows, over this part of its width."""

ORDERS = 300.0
"""Values that are further apart than this factor are drawn on a logarithmic axis."""


def picture_of(study: str, results: Results, printed: Paper, path: Path) -> Path:
    """Draw what a study gave beside what was printed: as it draws itself, or else as all are drawn."""
    if not results.cells:
        raise UserError(f"there is nothing to draw: no run of {results.study} has given a result")
    return (studies[study].draw or figure)(results, printed, path)


def figure(results: Results, printed: Paper, path: Path) -> Path:
    """Draw a panel for each metric of each table: columns along the axis, a colour for each row.

    Many panels stand three in a row, as papers have them. Tables and columns that are not run yet have their
    room, and panels of the same score one scale, so that they can be compared.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display needed

    titles = _panels(results)
    across = ACROSS if len(titles) >= MANY else 1
    down = math.ceil(len(titles) / across)
    picture = Figure(figsize=(4.0 + 4.5 * across, 1.0 + 2.8 * down), dpi=120, layout="constrained")
    panels = picture.subplots(down, across, squeeze=False).ravel()
    for unused in panels[len(titles) :]:
        unused.set_axis_off()
    colours = {row: f"C{i % 10}" for i, row in enumerate(dict.fromkeys(cell.row for cell in results.cells))}
    for axes, (metric, title) in zip(panels, titles, strict=False):
        _panel(axes, metric, title, results, printed, colours)
    for score in SHARES:
        _on_one_scale([axes for axes, (metric, _) in zip(panels, titles, strict=False) if metric == score])
    marks = [panels[0].plot([], [], "o", color=colour, label=row)[0] for row, colour in colours.items()]
    for mark, label in (_our_marks(results) | _paper_marks(results, printed)).items():
        marks.append(panels[0].plot([], [], mark, mfc="none", color="black", label=label)[0])
    picture.legend(handles=marks, loc="outside right upper", fontsize="small", frameon=False)
    picture.suptitle(_heading(results))
    return save_picture(picture, path)


def _panel(
    axes: Any, metric: str, title: str, results: Results, printed: Paper, colours: Mapping[str, str]
) -> None:
    """Draw one metric of one table."""
    cells = [cell for cell in results.cells if cell.table == title and metric in cell.metrics]
    rows = in_order(cells, results.study, 1) if cells else []
    columns = _columns(cells, results.study, title)
    for cell in cells:
        aside = (rows.index(cell.row) + 0.5) / len(rows) - 0.5
        x = columns.index(cell.column) + SPREAD * aside
        _draw(axes, x, cell, metric, colours[cell.row], printed)
    axes.set_xticks(range(len(columns)), [column.replace(" (", "\n(") for column in columns])
    axes.set(title=title, ylabel=metric.replace("_", " "), xlim=(-0.5, len(columns) - 0.5))
    axes.grid(alpha=0.3, axis="y")
    low, high = axes.dataLim.intervaly
    if low > 0 and high > ORDERS * low:
        axes.set_yscale("log")


def _panels(results: Results) -> list[tuple[str, str]]:
    """Return metric and table of every panel: metric after metric, tables as the study has them.

    A table without a result has an empty panel of the first metric, so that the others stand where the paper
    has them; not where only one table was run, as in a quick look.
    """
    there = list(dict.fromkeys((name, cell.table) for cell in results.cells for name in cell.metrics))
    metrics = list(dict.fromkeys(metric for metric, _ in there))
    run = list(dict.fromkeys(table for _, table in there))
    known = studies[results.study].order if results.study in studies and len(run) > 1 else {}
    tables = list(dict.fromkeys([*(at[0] for at in known), *run]))
    there += [(metrics[0], table) for table in tables if table not in run]
    return sorted(there, key=lambda panel: (metrics.index(panel[0]), tables.index(panel[1])))


def _columns(cells: Sequence[Measured], study: str, table: str) -> list[str]:
    """Return the columns of a table, those without a result too, as the study has them."""
    known = studies[study].order if study in studies else {}
    own = dict.fromkeys(at[2] for at in known if at[0] == table)
    found = in_order(cells, study, 2) if cells else []
    return [*own, *(column for column in found if column not in own)]


def _on_one_scale(panels: Sequence[Any]) -> None:
    """Give panels of a score the same limits, none of them where a share cannot be.

    A bar of one deviation may end below 0 or above 1; it is cut off there.
    """
    linear = [axes for axes in panels if axes.get_yscale() == "linear"]
    limits = [axes.get_ylim() for axes in linear if axes.has_data()]
    if limits:
        low, high = min(low for low, _ in limits), max(high for _, high in limits)
        room = ROOM * (high - low)
        for axes in linear:
            axes.set_ylim(max(low, -room), min(high, 1.0 + room))


def _heading(results: Results) -> str:
    """Name the study, and say how many of its places the picture has where that is not all."""
    places = studies[results.study].order if results.study in studies else {}
    there = sum(bool(cell.metrics) for cell in results.cells)
    return f"{results.study}: {there} of {len(places)} places" if there < len(places) else results.study


def _our_marks(results: Results) -> dict[str, str]:
    """Return the mark of what has one seed, where others have more."""
    counts = {len(cell.seeds) == 1 for cell in results.cells}
    return {"x": "one seed"} if counts == {True, False} else {}


def _paper_marks(results: Results, printed: Paper) -> dict[str, str]:
    """Return the marks that stand for the paper's numbers, with what they mean."""
    said = [printed.at(*cell.place, metric) for cell in results.cells for metric in cell.metrics]
    values = any(one is not None and one.value is not None for one in said)
    bounds = any(one is not None and one.below is not None for one in said)
    return ({"s": "paper"} if values else {}) | ({"v": "paper: less than"} if bounds else {})


def _draw(axes: Any, x: float, cell: Measured, metric: str, colour: str, printed: Paper) -> None:
    """Draw ours at x, a cross where there is one seed only, and what the paper prints there, if anything."""
    ours, theirs = cell.metrics[metric], printed.at(*cell.place, metric)
    if ours.mean is not None:
        if len(cell.seeds) == 1:
            axes.plot(x, ours.mean, "x", color=colour, markersize=6)
        else:
            axes.errorbar(x, ours.mean, ours.std or 0.0, fmt="o", color=colour, capsize=2, markersize=4)
    if theirs is not None and theirs.value is not None:
        axes.plot(x, theirs.value, "s", mfc="none", color=colour, markersize=8)
    elif theirs is not None and theirs.below is not None:
        axes.plot(x, theirs.below, "v", mfc="none", color=colour, markersize=8)
