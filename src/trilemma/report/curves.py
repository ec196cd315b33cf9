"""Curves of a quantity over rounds: the mean over seeds as a line, one standard deviation as a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trilemma.base.records import Record
from trilemma.report.picture_files import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00")
"""Okabe and Ito's colours, which colour-blind people can tell apart."""


@dataclass(frozen=True)
class Curve:
    """One line of a plot: `values` is (seeds, points) at the given rounds. `dashed` marks a reference.

    NaN: a seed that has not come so far.
    """

    label: str
    rounds: np.ndarray
    values: np.ndarray
    dashed: bool = False

    @classmethod
    def from_records(
        cls,
        label: str,
        seeds: Sequence[Sequence[Record]],
        quantity: str = "accuracy",
        dashed: bool = False,
    ) -> Curve:
        """Read one quantity (a score, a fact, any of `Record.figures`) from the records of each seed.

        Seeds without it are left out; the others may have come unequally far.

        >>> records = [Record(1, metrics={"accuracy": 0.5}), Record(2)]
        >>> Curve.from_records("caf", [records, []]).rounds
        array([1])
        """
        found = [{r.round: r.figures().get(quantity) for r in seed} for seed in seeds]
        return cls.of_points(label, found, dashed)

    @classmethod
    def of_points(
        cls, label: str, found: Sequence[Mapping[int, float | None]], dashed: bool = False
    ) -> Curve:
        """Return the curve through each seed's values by round."""
        points = [{round_: v for round_, v in seed.items() if v is not None} for seed in found]
        there = [seed for seed in points if seed]
        rounds = sorted(set().union(*there))
        values = np.array([[seed.get(round_, np.nan) for round_ in rounds] for seed in there], dtype=float)
        return cls(label, np.array(rounds, dtype=int), values.reshape(len(there), len(rounds)), dashed)

    @property
    def mean(self) -> np.ndarray:
        """The mean over the seeds that have come so far."""
        return np.asarray(np.nanmean(self.values, axis=0))

    @property
    def deviation(self) -> np.ndarray:
        """The standard deviation over the same seeds."""
        return np.asarray(np.nanstd(self.values, axis=0))


def plot_curves(curves: Sequence[Curve], path: Path, title: str = "", ylabel: str = "test accuracy") -> Path:
    """Draw the curves into a PNG or SVG file, each labelled at its end, and return its path."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display needed
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        if curve.rounds.size == 0:
            continue
        colour = "black" if curve.dashed else PALETTE[index % len(PALETTE)]
        mean, std = curve.mean, curve.deviation
        style = "--" if curve.dashed else "-"
        marker = "o" if curve.rounds.size == 1 else None
        axes.plot(curve.rounds, mean, style, color=colour, label=curve.label, linewidth=1.8, marker=marker)
        if len(curve.values) > 1:
            axes.fill_between(curve.rounds, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, fontsize="medium", loc="left")
    axes.grid(alpha=0.3)
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)  # names stand right of the lines' ends
    _label_ends(axes)
    return save_picture(figure, path)


def _label_ends(axes: Axes) -> None:
    """Write each line's name at its end, in its colour; names that would meet are moved apart."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    lines = sorted(axes.get_lines(), key=lambda line: float(np.asarray(line.get_ydata())[-1]))
    ends = [float(np.asarray(line.get_ydata())[-1]) for line in lines]
    for line, height in zip(lines, spread_out(ends, gap), strict=True):
        last = float(np.asarray(line.get_xdata())[-1])
        axes.annotate(
            str(line.get_label()),
            xy=(last, height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
            color=line.get_color(),
            annotation_clip=False,
        )


def spread_out(places: Sequence[float], gap: float) -> list[float]:
    """Move sorted places apart until each is `gap` above the one before, around where they were.

    >>> spread_out([1.0, 1.0, 5.0], 0.5)
    [0.75, 1.25, 5.0]
    """
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _edges(groups[-1], gap)[0] < _edges(groups[-2], gap)[1] + gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_edges(group, gap)[0] + gap * index for group in groups for index in range(len(group))]


def _edges(group: Sequence[float], gap: float) -> tuple[float, float]:
    """Return the lowest and the highest place of a group that is spread around its middle."""
    middle, half = sum(group) / len(group), gap * (len(group) - 1) / 2
    return middle - half, middle + half
