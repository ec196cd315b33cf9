"""The experiments of lp-proj: Tables 3 to 8, their grids, their printed numbers, and ours beside them.

    python -m trilemma.papers.lp_proj run synthetic00 --table 3 --out runs/lp-proj
    python -m trilemma.papers.lp_proj compare synthetic00 --table 3 --out runs/lp-proj

A point is a data set, a method, an attack and a share of Byzantine clients; it runs in a directory of its own
and continues where it was stopped. What the paper does not say (rounds, inner steps, chosen hyper-parameters)
is set here: `ROUNDS`, the defaults of the algorithms, and `CHOSEN`, found by `tune` on validation accuracy.

Reference: Lin, Han, Li, Zhang, "Personalized federated learning towards communication efficiency, robustness
and fairness", NeurIPS 2022, Appendix C.
"""

from trilemma.papers.lp_proj.blowup import growth
from trilemma.papers.lp_proj.grid import (
    ATTACKS,
    SHARES,
    TASKS,
    Benchmark,
    Point,
    points,
    printed,
    quantised_scalars,
)
from trilemma.papers.lp_proj.methods import CHOSEN, METHODS, TABLES, Method
from trilemma.papers.lp_proj.results import (
    Reached,
    SeedCurve,
    compare,
    curves,
    distances,
    plot_fairness,
    train_losses,
)

__all__ = [
    "ATTACKS",
    "CHOSEN",
    "METHODS",
    "SHARES",
    "TABLES",
    "TASKS",
    "Benchmark",
    "Method",
    "Point",
    "Reached",
    "SeedCurve",
    "compare",
    "curves",
    "distances",
    "growth",
    "plot_fairness",
    "points",
    "printed",
    "quantised_scalars",
    "train_losses",
]
