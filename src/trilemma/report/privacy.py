"""A picture of what privacy costs: ε over the rounds, and the noise each threat model needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trilemma.privacy import Plan


def plot_privacy(
    curves: Mapping[str, NDArray[np.float64]], plans: Sequence[Plan], path: Path, title: str, target: str
) -> Path:
    """Draw ε after each round by accountant, and beside it the noise in the honest mean by threat model.

    `curves` gives ε after rounds 1, 2, …; `plans` the calibrated noise of each threat model for the same
    guarantee, which `target` names.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display needed

    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, values in curves.items():
        # Some accountants are evaluated at a few rounds only; a step holds the next one's ε.
        left.step(np.arange(1, len(values) + 1), values, where="pre", label=name, linewidth=1.8)
    left.set(xlabel="round", ylabel="ε spent", title=title)
    left.grid(alpha=0.3)
    left.legend(frameon=False, title="accountant")

    names = [plan.threat.name for plan in plans]
    bars = right.bar(names, [math.sqrt(plan.variance) for plan in plans], color=[f"C{k}" for k in range(4)])
    right.bar_label(bars, fmt="%.3g", padding=2)
    right.margins(y=0.12)
    right.set(ylabel="noise std in the honest mean, per coordinate", title=f"least noise for {target}")
    right.grid(alpha=0.3, axis="y")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
