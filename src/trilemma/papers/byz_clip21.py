"""Byz-Clip21-SGD2M on MNIST, Figures 1 and 2: three algorithms × noise laws × step sizes, at ε = 13.

Printed as curves: under inner-product manipulation Byz-Clip21-SGD2M matches or beats Byz-Clip-SGD and
SAFE-DSHB at every ε, roughly 70 % with the CNN and 75 to 80 % with the MLP at the larger ε; under label
flipping by a clear margin.

The paper runs 60 epochs and picks γ and τ by the final accuracy from grids of 5 × 6 points. As long as every
gradient is longer than τ only γτ matters, so `places` walks along γτ with τ fixed, for the MLP, f = 5. It
asks which noise the printed accuracies need:

    certified            ε = 13 for replacing a client's data in all T = 2820 rounds
    paper                σ = τ √(T log(1/δ)) / ε, the paper's formula
    paper, T in epochs   the same with T = 60: what the formula gives if T counts epochs
"""

from __future__ import annotations

import math

from trilemma.config import load
from trilemma.papers.grid import Place
from trilemma.papers.study import Study, studies

EPSILON, DELTA, EPOCHS = 13.0, 4e-4, 60
STEPS = (1e-2, 1e-3, 1e-4, 1e-5)
"""γτ of Byz-Clip-SGD and SAFE-DSHB. Byz-Clip21-SGD2M gets a tenth: its g_i adds up to β̂Tτ = 28τ, not τ."""

ALGORITHMS = {
    "Byz-Clip21-SGD2M (γτ/10)": (
        "{name='byz-clip21-sgd2m', beta=0.1, beta_hat=0.01, batch_size=64}",
        1e-3,
        0.1,
    ),
    "Byz-Clip-SGD": ("{name='byz-clip-sgd', batch_size=64}", 1e-2, 1.0),
    "SAFE-DSHB": ("{name='safe-dshb', unit='user', momentum=0.9, batch_size=64}", 1e-2, 1.0),
}
"""Algorithm, its τ, and its share of γτ."""

ATTACKS = {"IPM": "attack={name='ipm', strength=10.0}", "LF": "attack={name='lf'}"}


def noise(law: str, clip: float) -> str:
    """Return the `[privacy]` settings of a noise law.

    >>> noise("paper, T in epochs", 0.01)
    'sigma_ind=0.016667'
    """
    match law:
        case "certified":
            return f"epsilon={EPSILON}"
        case "paper":
            return f"epsilon={EPSILON}, noise='paper'"
    return f"sigma_ind={clip * math.sqrt(EPOCHS * math.log(1 / DELTA)) / EPSILON:.5g}"


def places(seeds: str) -> list[Place]:
    """Return the grid for f = 5 of 25; all algorithms of a table get the same multiple of τ as noise."""
    base = load("byz-clip21-mnist-mlp", [f"run.seeds='{seeds}'"])
    grid = []
    for attack, attacked in ATTACKS.items():
        for law in ("certified", "paper", "paper, T in epochs"):
            table = f"MNIST, MLP, 20 honest, f = 5, {attack}, noise: {law}"
            for row, (algorithm, clip, share) in ALGORITHMS.items():
                for step in STEPS:
                    settings = base.with_(
                        attacked,
                        f"algorithm={algorithm}",
                        f"algorithm.lr={step * share / clip:.6g}",
                        f"privacy={{threat='ldp', delta={DELTA}, clip={clip}, {noise(law, clip)}}}",
                    )
                    grid.append(Place(table, row, f"γτ = {step:g}", settings))
    return grid


studies.register("byz-clip21", "Byz-Clip21-SGD2M on MNIST at ε = 13: algorithms × noise laws × step sizes")(
    Study(
        paper="byz-clip21",
        figures="Figures 1 and 2, the MLP with f = 5",
        places=places,
        left_out="54 of 60 epochs; seeds 2 and 3; label flipping; step sizes but γτ = 1e-2 and 1e-3; noise "
        "by the formula with T in rounds",
        kept=lambda place: (
            "IPM" in place.table
            and place.column in ("γτ = 0.01", "γτ = 0.001")
            and not place.table.endswith("noise: paper")
        ),
        shorter=("run.rounds=282",),
    )
)
