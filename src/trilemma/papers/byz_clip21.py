"""Byz-Clip21-SGD2M on MNIST, Figures 1 and 2: three algorithms × ε, the best of a grid of γ and τ.

Printed as curves: under inner-product manipulation Byz-Clip21-SGD2M matches or beats Byz-Clip-SGD and
SAFE-DSHB at every ε, roughly 70 % with the CNN and 75 to 80 % with the MLP at the larger ε; under label
flipping by a clear margin.

The paper runs 60 epochs and picks γ and τ by the final accuracy from grids of 5 × 6 points. The full grid is
hours on a GPU; `cells` spans the part of it given by `LEARNING_RATES` and `CLIPS`, with the MLP.
"""

from __future__ import annotations

from pathlib import Path

from trilemma.config import load
from trilemma.papers.grid import Cell

EPSILONS = (3.0, 13.0)
LEARNING_RATES = (1.0, 0.1)
CLIPS = (1.0, 0.1, 0.01)
ALGORITHMS = {
    "Byz-Clip21-SGD2M": "algorithm={name='byz-clip21-sgd2m', beta=0.1, beta_hat=0.01, batch=64, lr=1.0}",
    "Byz-Clip-SGD": "algorithm={name='byz-clip-sgd', batch=64, lr=1.0}",
    "SAFE-DSHB": "algorithm={name='safe-dshb', unit='user', momentum=0.9, batch=64, lr=1.0}",
}
ATTACKS = {"IPM": "attack={name='ipm', strength=10.0}", "LF": "attack={name='lf'}"}


def cells(configs: Path, seeds: str) -> list[Cell]:
    """Return the grid for f = 5 of 25; every algorithm sees the same noise law, calibrated to ε."""
    base = load(configs / "byz-clip21-mnist-mlp.toml", [f"run.seeds='{seeds}'"])
    grid = []
    for attack, attacked in ATTACKS.items():
        for epsilon in EPSILONS:
            table = f"MNIST, MLP, 20 honest, f = 5, {attack}, ε = {epsilon:g}"
            for row, algorithm in ALGORITHMS.items():
                for lr in LEARNING_RATES:
                    for clip in CLIPS:
                        settings = base.with_(
                            attacked,
                            algorithm,
                            f"privacy.epsilon={epsilon}",
                            f"algorithm.lr={lr}",
                            f"privacy.clip={clip}",
                        )
                        grid.append(Cell(table, row, f"γ {lr:g}, τ {clip:g}", settings))
    return grid
