"""The experiments of lp-proj: Tables 3 to 8, Figures 5 and 6, their grids, their printed numbers, the theory.

    trilemma papers run lp-proj-synthetic00 --only "Table 3"
    trilemma papers compare lp-proj-synthetic00

A point is a data set, a method, an attack and a share of Byzantine clients. What the paper does not say
(rounds, inner steps, chosen hyper-parameters) is set here: `ROUNDS`, the defaults of the algorithms, and
`CHOSEN`, found by `trilemma papers tune` on validation accuracy.

Reference: Lin, Han, Li, Zhang, "Personalized federated learning towards communication efficiency, robustness
and fairness", NeurIPS 2022, Appendix C.
"""

from trilemma_lab.papers.lp_proj.blowup import growth
from trilemma_lab.papers.lp_proj.grid import (
    ATTACKS,
    SHARES,
    TASKS,
    Benchmark,
    GridPoint,
    points,
    printed,
    quantised_scalars,
)
from trilemma_lab.papers.lp_proj.methods import CHOSEN, METHODS, TABLES, Method
from trilemma_lab.papers.lp_proj.results import Reached, SeedCurve, curves_in, train_losses_in, tried

__all__ = [
    "ATTACKS",
    "CHOSEN",
    "METHODS",
    "SHARES",
    "TABLES",
    "TASKS",
    "Benchmark",
    "GridPoint",
    "Method",
    "Reached",
    "SeedCurve",
    "curves_in",
    "growth",
    "points",
    "printed",
    "quantised_scalars",
    "train_losses_in",
    "tried",
]
