"""lp-proj's Figures 5 and 6 from what was measured: losses and accuracies over rounds; fairness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trilemma.base.records import Spread
from trilemma.report.picture_files import save_picture
from trilemma_lab.papers.published import Paper
from trilemma_lab.studies.measured import Measured, Results


def draw(results: Results, printed: Paper, path: Path) -> Path:
    """Draw Figure 6, ours filled and the paper's hollow; and Figure 5, where curves were measured."""
    from matplotlib.figure import Figure

    curves = [cell for cell in results.cells if cell.table == "Figure 5"]
    ends = [cell for cell in results.cells if cell.table == "Table 3"]
    panels = (["train_loss", "accuracy"] if curves else []) + ["fairness"]
    widths = [1.4 if panel == "fairness" else 1.0 for panel in panels]
    picture = Figure(figsize=(1.8 + 4.4 * sum(widths), 4.8), dpi=120, layout="constrained")
    looks = _looks(list(dict.fromkeys(cell.row for cell in (*ends, *curves))))
    all_axes = picture.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        if panel == "fairness":
            for cell in ends:
                _fairness(axes, cell, printed, looks[cell.row])
            axes.set(
                xlabel="accuracy",
                ylabel="variance over clients",
                yscale="log",
                title="Figure 6: best is lower right",
            )
            axes.set_xscale("function", functions=(_nines, _share))
            ticks = _readable(*axes.get_xlim())
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        else:
            for cell in curves:
                _curve(axes, cell, panel, looks[cell.row])
            axes.set(xlabel="round", xscale="log", title=f"Figure 5: {panel.replace('_', ' ')}")
            last = max((t for cell in curves for t, _ in _points(cell, panel)), default=1)
            rounds = [t for t in (1, 2, 5, 10, 20, 50, 100, 200) if t <= last]
            axes.set_xticks(rounds, [str(t) for t in rounds])
            axes.set_xticks([], minor=True)
            axes.set_yscale("log" if panel == "train_loss" else "linear")
        axes.grid(alpha=0.3)
    marks = [
        axes.plot([], [], look.line, marker=look.mark, color=look.colour, label=row)[0]
        for row, look in looks.items()
    ]
    marks.append(axes.plot([], [], "o:", mfc="none", color="black", label="paper, joined to ours")[0])
    picture.legend(handles=marks, loc="outside right upper", fontsize="small", frameon=False)
    picture.suptitle(results.study)
    return save_picture(picture, path)


@dataclass(frozen=True)
class PictureLook:
    """How a method is drawn: its colour, mark and line."""

    colour: str
    mark: str
    line: str = "-"


LOOKS = {
    "Ditto": PictureLook("tab:blue", "o"),
    "pFedMe": PictureLook("tab:cyan", "s"),
    "Per-FedAvg": PictureLook("tab:orange", "D"),
    "FedAvg": PictureLook("goldenrod", "^"),
    "Local": PictureLook("yellowgreen", "v"),
    "Local, 20 steps": PictureLook("tab:green", "<", "--"),
    "Local, 100 steps": PictureLook("darkgreen", ">", "--"),
    "lp-proj-1": PictureLook("tab:red", "P"),
    "lp-proj-2": PictureLook("tab:purple", "X"),
    "lp-proj-1, R = 5": PictureLook("darkred", "P", "-."),
    "lp-proj-2, R = 5": PictureLook("indigo", "X", "-."),
    "RSA": PictureLook("tab:brown", "p"),
    "LG-FedAvg": PictureLook("tab:gray", "*"),
}
"""The same in every picture; Local with lp-proj's steps is broken, so that both show where they coincide."""


def _looks(rows: Sequence[str]) -> dict[str, PictureLook]:
    """Return how rows are drawn; those of no table of the paper's in black.

    >>> _looks(("Ditto", "another"))["another"].colour
    'black'
    """
    return {row: LOOKS.get(row, PictureLook("black", "h")) for row in rows}


def _nines(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Stretch the axis towards 1, where most methods are: −log of what is missing, which is at least 10⁻⁶.

    >>> _nines(np.array([0.9, 0.99, 1.0])).round(1).tolist()
    [2.3, 4.6, 13.8]
    """
    return -np.log(np.maximum(1.0 - np.asarray(share), 1e-6))


def _share(nines: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of so many nines.

    >>> _share(_nines(np.array([0.25, 0.9]))).round(6).tolist()
    [0.25, 0.9]
    """
    return 1.0 - np.exp(-np.asarray(nines))


TICKS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995)


def _readable(low: float, high: float) -> list[float]:
    """Return accuracies to write below the axis: of `TICKS`, from the right, those that do not touch.

    >>> _readable(0.65, 0.98)
    [0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98]
    """
    apart = 0.06 * float(_nines(np.array(high)) - _nines(np.array(low)))
    kept: list[float] = []
    for tick in reversed([one for one in TICKS if low <= one <= high]):
        if not kept or _nines(np.array(kept[0])) - _nines(np.array(tick)) >= apart:
            kept.insert(0, tick)
    return kept


def _fairness(axes: Any, cell: Measured, printed: Paper, look: PictureLook) -> None:
    """Draw ours filled, the paper's hollow, and what joins them."""
    accuracy, variance = (cell.metrics.get(metric) for metric in ("accuracy", "variance"))
    ours = [one.mean for one in (accuracy, variance) if one is not None and one.mean]
    theirs = [printed.at(*cell.place, metric) for metric in ("accuracy", "variance")]
    values = [one.value for one in theirs if one is not None and one.value]
    if len(values) == len(ours) == 2:
        axes.plot(*zip(values, ours, strict=True), ":", color=look.colour, linewidth=1, alpha=0.6)
    if len(ours) == 2:
        axes.plot(*ours, look.mark, color=look.colour, mec="white", mew=0.6, markersize=8, alpha=0.9)
    if len(values) == 2:
        axes.plot(*values, look.mark, mfc="none", color=look.colour, markersize=9)


def _curve(axes: Any, cell: Measured, metric: str, look: PictureLook) -> None:
    if points := _points(cell, metric):
        axes.plot(
            *zip(*points, strict=True),
            look.line,
            marker=look.mark,
            markersize=3.5,
            color=look.colour,
            linewidth=1.2,
        )


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
    return save_picture(picture, path)


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
