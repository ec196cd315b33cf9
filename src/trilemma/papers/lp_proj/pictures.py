"""lp-proj's Figures 5 and 6 from what was measured: losses and accuracies over rounds; fairness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trilemma.papers.measured import Measured, Results
from trilemma.papers.published import Paper


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
            axes.set_yscale("log" if panel == "train_loss" else "linear")
        axes.grid(alpha=0.3)
    marks = [axes.plot([], [], mark, color=colour, label=row)[0] for row, (colour, mark) in looks.items()]
    marks.append(axes.plot([], [], "o", mfc="none", color="black", label="paper")[0])
    picture.legend(handles=marks, loc="outside right upper", fontsize="small", frameon=False)
    picture.suptitle(results.study)
    picture.savefig(path)
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
    found = {
        int(name.partition("@")[2]): one.mean
        for name, one in cell.metrics.items()
        if name.startswith(f"{metric}@")
    }
    points = [(t, mean) for t, mean in sorted(found.items()) if mean is not None]
    if points:
        axes.plot(*zip(*points, strict=True), ".-", color=colour, linewidth=1)
