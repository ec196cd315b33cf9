"""lp-proj's theory of linear regression (appendix B) against simulation: expected losses and fairness.

Four clients in three dimensions, small enough to work out by hand. The paper's side of the table is its
formulas, with their slips mended (`linear`), at that example; ours draws the clients' data and the liars'
messages many times over.
"""

from __future__ import annotations

import numpy as np

from trilemma.base.keys import Key
from trilemma.base.records import Spread
from trilemma_lab.papers.lp_proj import linear
from trilemma_lab.studies.measured import Measured
from trilemma_lab.studies.study import Study, studies

EXAMPLE = linear.LinearFederation(
    w=np.array([[1.0, 0, 0], [0, 2, 0], [0, 0, 1], [3, 1, 1]]),
    n=10,
    b=1.0,
    sigma=1.0,
    lam=1.0,
    p=np.array([[1.0, 0, 0]]),
)
TAU = 2.0
LIARS = (3,)
ATTACKS: dict[str, linear.Attack | None] = {
    "no attack": None,
    "same value": "same-value",
    "Gaussian": "gaussian",
    "sign flip": "sign_flip",
}
METHODS = {"Local": "local", "FedAvg": "fedavg", "pFedMe": "pfedme", "lp-proj-2": "lp_proj"}
SEEDS, DRAWS, QUICK = (1, 2, 3, 4, 5), 4_000, 400


def cells(quick: bool) -> list[Measured]:
    """Simulate the example; a seed is so many draws."""
    draws = QUICK if quick else DRAWS
    found = []
    for column, attack in ATTACKS.items():
        losses = {seed: _losses(seed, attack, draws) for seed in SEEDS}
        found += [
            Measured(
                "expected test loss",
                row,
                column,
                {"loss": Spread.of({seed: round(float(one[row].mean()), 6) for seed, one in losses.items()})},
                SEEDS,
                settings={"draws": draws},
            )
            for row in METHODS
        ]
        if attack is None:
            found += [
                Measured(
                    "variance over clients of the expected test loss",
                    row,
                    column,
                    {
                        "variance": Spread.of(
                            {s: round(float(one[row].var()), 6) for s, one in losses.items()}
                        )
                    },
                    SEEDS,
                    settings={"draws": draws},
                )
                for row in METHODS
            ]
    return found


def _losses(seed: int, attack: linear.Attack | None, draws: int) -> dict[str, np.ndarray]:
    """Return every honest client's loss, the mean over draws, by method."""
    rng = Key(seed).fold("theory", attack or "none").numpy()
    liars = () if attack is None else LIARS
    drawn = [linear.simulate(EXAMPLE, rng, attack, TAU, liars) for _ in range(draws)]
    return {
        row: np.mean([np.asarray(getattr(one, name)) for one in drawn], axis=0)
        for row, name in METHODS.items()
    }


studies.register("lp-proj-theory", "lp-proj, appendix B: linear regression, formulas against simulation")(
    Study(
        paper="lp-proj",
        figures="Appendix B: losses and fairness of linear regression",
        compute=cells,
        left_out="nine tenths of the draws",
    )
)
