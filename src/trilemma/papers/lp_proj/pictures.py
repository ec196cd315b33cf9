"""lp-proj's Figures 5 and 6 from what was measured: losses and accuracies over rounds; fairness."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

from trilemma.papers.measured import Measured, Results
from trilemma.papers.published import Paper
from trilemma.records import Spread
from trilemma.report.picture_files import picture_file


def draw(results: Results, printed: Paper, path: Path) -> Path:
    """Draw Figure 6, ours filled and the paper's hollow; and Figure 5, where curves were measured."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    curves = [cell for cell in results.cells if cell.table == "Figure 5"]
    ends = [cell for cell in results.cells if cell.table == "Table 3"]
    panels = (["train_loss", "accuracy"] if curves else []) + ["fairness"]
    picture = Figure(figsize=(1.0 + 4.4 * len(panels), 4.6), dpi=120, layout="constrained")
    rows = dict.fromkeys(cell.row for cell in (*ends, *curves))
    looks = {row: (colormaps["tab20"](i % 20), MARKS[i % len(MARKS)]) for i, row in enumerate(rows)}
    for axes, panel in zip(picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if panel == "fairness":
            for cell in ends:
                _fairness(axes, cell, printed, *looks[cell.row])
            axes.set(
                xlabel="accuracy",
                ylabel="variance over clients",
                yscale="log",
                title="Figure 6: best is lower right",
            )
        else:
            for cell in curves:
                _curve(axes, cell, panel, looks[cell.row][0])
            axes.set(xlabel="round", xscale="log", title=f"Figure 5: {panel.replace('_', ' ')}")
            last = max((t for cell in curves for t, _ in _points(cell, panel)), default=1)
            rounds = [t for t in (1, 2, 5, 10, 20, 50, 100, 200) if t <= last]
            axes.set_xticks(rounds, [str(t) for t in rounds])
            axes.set_xticks([], minor=True)
            axes.set_yscale("log" if panel == "train_loss" else "linear")
        axes.grid(alpha=0.3)
    marks = [axes.plot([], [], mark, color=colour, label=row)[0] for row, (colour, mark) in looks.items()]
    marks.append(axes.plot([], [], "o", mfc="none", color="black", label="paper")[0])
    picture.legend(handles=marks, loc="outside right upper", fontsize="small", frameon=False)
    picture.suptitle(results.study)
    picture.savefig(picture_file(path))
    return path


MARKS = "osD^v<>PX*hp"


def _fairness(axes: Any, cell: Measured, printed: Paper, colour: Any, mark: str) -> None:
    accuracy, variance = cell.metrics.get("accuracy"), cell.metrics.get("variance")
    if accuracy is not None and variance is not None and accuracy.mean and variance.mean:
        axes.plot(accuracy.mean, variance.mean, mark, color=colour)
    theirs = [printed.at(*cell.place, metric) for metric in ("accuracy", "variance")]
    values = [one.value for one in theirs if one is not None and one.value]
    if len(values) == 2:
        axes.plot(*values, mark, mfc="none", color=colour, markersize=9)


def _curve(axes: Any, cell: Measured, metric: str, colour: Any) -> None:
    if points := _points(cell, metric):
        axes.plot(*zip(*points, strict=True), ".-", color=colour, linewidth=1)


def _points(cell: Measured, metric: str) -> list[tuple[int, float]]:
    """Return the rounds of which a curve has a value, and the values."""
    found = {
        int(name.partition("@")[2]): one.mean
        for name, one in cell.metrics.items()
        if name.startswith(f"{metric}@")
    }
    return [(t, mean) for t, mean in sorted(found.items()) if mean is not None]


def draw_growth(results: Results, printed: Paper, path: Path) -> Path:
    """Draw exponents as maps of colours, one for each attack: η_l and η_p down, λ and R across."""
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(cell.column for cell in results.cells))
    picture = Figure(figsize=(1.0 + 4.6 * len(columns), 4.4), dpi=120, layout="constrained")
    down, across = (list(dict.fromkeys(_halves(cell.row)[i] for cell in results.cells)) for i in (0, 1))
    for axes, column in zip(picture.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        found = {_halves(c.row): c.metrics.get("growth") for c in results.cells if c.column == column}
        values = [[_mean(found.get((row, one))) for one in across] for row in down]
        axes.imshow(values, cmap="RdBu_r", vmin=-STRONGEST, vmax=STRONGEST, aspect="auto")
        axes.set_xticks(range(len(across)), [one.replace(", ", "\n") for one in across])
        axes.set_yticks(range(len(down)), down)
        for (y, row), (x, one) in product(enumerate(down), enumerate(across)):
            said = _said(found.get((row, one)))
            dark = abs(values[y][x]) > DARK
            axes.text(
                *(x, y, said), ha="center", va="center", fontsize="small", color="white" if dark else "black"
            )
        axes.set(title=column)
    picture.suptitle("growth exponent a round; below 0 liars do not blow w up")
    picture.savefig(picture_file(path))
    return path


STRONGEST, DARK = 1.2, 0.7
"""The exponent of the darkest colour, and that from which on black cannot be read."""


def _mean(growth: Spread | None) -> float:
    """Return an exponent; of a place that was not run, or is no number, that for which no colour is drawn."""
    return math.nan if growth is None or growth.mean is None else growth.mean


def _said(growth: Spread | None) -> str:
    """Write an exponent down: nothing where none was computed, a star where it is no number.

    >>> _said(Spread.of({1: 0.5})), _said(Spread.of({1: None})), _said(None)
    ('0.50', '*', '')
    """
    return "" if growth is None else "*" if growth.mean is None else f"{growth.mean:.2f}"


def _halves(row: str) -> tuple[str, str]:
    """Return the step sizes of a row, and the rest.

    >>> _halves("η_l = 0.1, η_p = 0.05, λ = 1, R = 5")
    ('η_l = 0.1, η_p = 0.05', 'λ = 1, R = 5')
    """
    steps, _, rest = row.partition(", λ")
    return steps, f"λ{rest}"
