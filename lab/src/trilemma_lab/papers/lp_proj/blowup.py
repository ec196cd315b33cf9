"""How fast attacks that multiply messages blow up lp-proj-2's common vector: a linear model of its rounds.

Leave the losses out. A solve of K steps then moves q_k = P x_k towards w, a step of w moves it towards q_k, R
times a round, and the server averages the S messages it hears, of which a liar's is multiplied by c:

    q_k ← w_k + (1 − η_p λ)^K (q_k − w_k),    w_k ← w_k − η_l λ (w_k − q_k);    w ← mean of w_k or c w_k

‖(w, q)‖ changes by a factor e^g a round: below 0 the clients' own models hold w back faster than the liars
enlarge it, above 0 the run ends in overflow if it is only long enough. Taking P Pᵀ for I is exact for
orthonormal rows and near it for d ≪ D.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from trilemma.base.keys import Key
from trilemma.base.records import Spread
from trilemma_lab.papers.lp_proj.pictures import draw_growth
from trilemma_lab.studies.measured import Measured
from trilemma_lab.studies.study import Study, studies

ROUNDS, RUNS, INNER_STEPS = 200, 6, 20

Multiplier = Callable[[np.random.Generator, int], np.ndarray]


def poison(rng: np.random.Generator, count: int) -> np.ndarray:
    """C ~ N(0, 20²): data poisoning's messages."""
    return rng.normal(0.0, 20.0, count)


def flip(rng: np.random.Generator, count: int) -> np.ndarray:
    """C = −|N(0, 10²)|: sign flips."""
    return -np.abs(rng.normal(0.0, 10.0, count))


def growth(
    lr: float,
    personal_lr: float,
    lam: float,
    local_rounds: int,
    *,
    share: float,
    multiplier: Multiplier,
    clients: int = 100,
    sampled: int = 10,
) -> float:
    """Return the mean growth exponent g a round, over `RUNS` runs of `ROUNDS` rounds.

    >>> growth(0.1, 0.1, 0.1, 1, share=0.2, multiplier=poison) > 0.3
    True
    >>> growth(0.5, 0.01, 1.0, 5, share=0.2, multiplier=poison) < 0.0
    True
    """
    liars = round(share * clients)
    pull, keep = lr * lam, (1.0 - personal_lr * lam) ** INNER_STEPS
    total = 0.0
    for run in range(RUNS):
        rng = Key(run).fold("growth").numpy()
        w, q = 1.0, np.zeros(clients)  # coordinates do not mix: one is enough
        for _ in range(ROUNDS):
            own = np.full(clients, w)
            for _ in range(local_rounds):
                q = own + keep * (q - own)
                own = own - pull * (own - q)
            heard = rng.choice(clients, sampled, replace=False)
            scale = np.where(heard < liars, multiplier(rng, sampled), 1.0)
            w = float((own[heard] * scale).mean())
            size = math.hypot(w, float(np.abs(q).max()))
            total += math.log(size)
            w, q = w / size, q / size
    return total / (RUNS * ROUNDS)


def cells(quick: bool) -> list[Measured]:
    """Return the exponents over the paper's grid, for 20 % poisoning and 50 % flips; quickly: at R = 1."""
    rounds = (1,) if quick else (1, 5)
    grid = itertools.product((0.05, 0.1, 0.5), (0.01, 0.05, 0.1), (0.1, 1.0, 10.0), rounds)
    attacks = {"20 % poisoning": (0.2, poison), "50 % flips": (0.5, flip)}
    return [
        Measured(
            "growth exponent a round",
            f"η_l = {lr:g}, η_p = {personal_lr:g}, λ = {lam:g}, R = {local_rounds}",
            column,
            {"growth": Spread.of({1: round(growth(*point, share=share, multiplier=multiplier), 3)})},
            (1,),
        )
        for point in grid
        for lr, personal_lr, lam, local_rounds in [point]
        for column, (share, multiplier) in attacks.items()
    ]


studies.register("lp-proj-growth", "lp-proj: how fast liars blow up its common vector, on the paper's grid")(
    Study(
        paper="lp-proj",
        figures="the stars of Tables 6 and 8",
        compute=cells,
        left_out="R = 5",
        draw=draw_growth,
    )
)
