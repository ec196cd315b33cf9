"""Curves of a quantity over rounds: the mean over seeds as a line, one standard deviation as a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trilemma.records import Record


@dataclass(frozen=True)
class Curve:
    """One line of a plot: `values` is (seeds, points) at the given rounds. `dashed` marks a reference."""

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
        """Read one quantity (a score, or a fact) from the records of each seed, where all seeds have it.

        >>> records = [Record(1, metrics={"accuracy": 0.5}), Record(2)]
        >>> Curve.from_records("caf", [records]).rounds
        array([1])
        """
        found = [{r.round: {**r.facts, **r.metrics}.get(quantity) for r in seed} for seed in seeds]
        points = [{round_: v for round_, v in seed.items() if v is not None} for seed in found]
        shared = sorted(set.intersection(*(set(p) for p in points))) if points else []
        values = np.array([[p[round_] for round_ in shared] for p in points])
        return cls(label, np.array(shared), values, dashed)


def plot_curves(curves: Sequence[Curve], path: Path, title: str = "", ylabel: str = "test accuracy") -> Path:
    """Draw the curves into a PNG file and return its path."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display needed

    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        if curve.rounds.size == 0:
            continue
        colour = "black" if curve.dashed else f"C{index % 10}"
        mean, std = curve.values.mean(axis=0), curve.values.std(axis=0)
        style = "--" if curve.dashed else "-"
        marker = "o" if curve.rounds.size == 1 else None
        axes.plot(curve.rounds, mean, style, color=colour, label=curve.label, linewidth=1.8, marker=marker)
        if len(curve.values) > 1:
            axes.fill_between(curve.rounds, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small", frameon=False)
    figure.savefig(path)
    return path
