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

Only the last reaches them, so the figures (`byz-clip21-figure1` and `-figure2`, ε from 3 to 23) are run with
it; of the step sizes tried at each place the best is shown, as the paper does. Figure F.1 clips every
example's gradient: its noise is the paper's formula for subsampled batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from trilemma.experiment import Config, load
from trilemma.papers.grid import Place
from trilemma.papers.study import Study, studies

EPSILON, DELTA, EPOCHS = 13.0, 4e-4, 60
EPSILONS = (3.0, 8.0, 13.0, 18.0, 23.0)
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
    return f"sigma_ind={in_epochs(clip, EPSILON):.5g}"


def in_epochs(clip: float, epsilon: float) -> float:
    """Return σ by the paper's formula with T in epochs: τ √(60 log(1/δ)) / ε."""
    return clip * math.sqrt(EPOCHS * math.log(1 / DELTA)) / epsilon


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


@dataclass(frozen=True)
class Panel:
    """A row of panels of Figures 1, 2 and F.1: a model, its batch size and how many lie in each."""

    model: str
    batch: int
    rounds: int
    liars: tuple[int, ...]


IPM_PANELS = (Panel("cnn", 32, 5640, (2, 5, 7)), Panel("mlp", 64, 2820, (2, 5, 8)))
LF_PANELS = (Panel("cnn", 32, 5640, (1, 5, 10)), Panel("mlp", 64, 2820, (1, 5, 10)))
"""Under IPM liars join 20 honest clients; under LF there are 25 in all. The text names no panel of Figure 2:
they are taken to be those of Figure F.1."""


def figure_places(seeds: str, attack: str) -> list[Place]:
    """Return Figure 1 (IPM) or 2 (LF): three algorithms × ε, with three step sizes at each place."""
    grid = []
    for panel in IPM_PANELS if attack == "IPM" else LF_PANELS:
        for f in panel.liars:
            base = _panel("byz-clip21-mnist-mlp", panel, f, 20 + f if attack == "IPM" else 25, seeds)
            table = f"{panel.model.upper()}, f = {f}, {attack}"
            for epsilon in EPSILONS:
                for row, (algorithm, clip, share) in ALGORITHMS.items():
                    sigma = f"sigma_ind={in_epochs(clip, epsilon):.5g}"
                    private = f"privacy={{threat='ldp', delta={DELTA}, clip={clip}, {sigma}}}"
                    settings = base.with_(ATTACKS[attack], f"algorithm={algorithm}", private)
                    name = row.removesuffix(" (γτ/10)")
                    grid += [
                        Place(
                            table, name, f"ε = {epsilon:g}", _stepping(settings, panel, step * share / clip)
                        )
                        for step in STEPS[:3]
                    ]
    return grid


AMPLIFIED = {
    "Byz-Clip21-SGD2M+": "{name='byz-clip21-sgd2m+', beta=0.1, beta_hat=0.01, outer_clip=1.0}",
    "Byz-Clip-SGD": "{name='byz-clip-sgd', unit='example'}",
    "SAFE-DSHB": "{name='safe-dshb', unit='example', momentum=0.9}",
}
"""Figure F.1: every example's gradient is clipped, batches are subsampled."""

INNER_CLIP = 0.1


def amplified_places(seeds: str) -> list[Place]:
    """Return Figure F.1: three algorithms × ε under label flipping, with three step sizes at each place."""
    grid = []
    for panel in LF_PANELS:
        halved = replace(panel, rounds=panel.rounds // 2)  # 30 epochs
        for f in panel.liars:
            base = _panel("byz-clip21-plus-mnist", halved, f, 25, seeds).with_(ATTACKS["LF"])
            for epsilon in (0.1, 0.3, 1.0, 3.0):
                said = f"threat='ldp', delta={DELTA}, clip={INNER_CLIP}, epsilon={epsilon}, noise='paper'"
                for row, algorithm in AMPLIFIED.items():
                    settings = base.with_(f"algorithm={algorithm}", f"privacy={{{said}}}")
                    grid += [
                        Place(
                            f"{panel.model.upper()}, f = {f}, LF, subsampled",
                            row,
                            f"ε = {epsilon:g}",
                            _stepping(settings, halved, lr),
                        )
                        for lr in (1.0, 0.1, 0.01)
                    ]
    return grid


def _panel(ready: str, panel: Panel, f: int, clients: int, seeds: str) -> Config:
    return load(
        ready,
        [
            f"model={{name='{panel.model}'}}",
            f"federation={{clients={clients}, byzantine={f}}}",
            f"run.rounds={panel.rounds}",
            f"run.evaluate_every={panel.rounds // 60}",
            f"run.seeds='{seeds}'",
        ],
    )


def _stepping(settings: Config, panel: Panel, lr: float) -> Config:
    return settings.with_(f"algorithm.lr={lr:.6g}", f"algorithm.batch_size={panel.batch}")


def _product(place: Place) -> float:
    """Return γτ of a run."""
    said = place.config.dump()
    return float(said["algorithm"]["lr"] * said["privacy"]["clip"])


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

for _number, _attack in ((1, "IPM"), (2, "LF")):
    studies.register(
        f"byz-clip21-figure{_number}",
        f"Byz-Clip21-SGD2M, Figure {_number}: {_attack}, CNN and MLP, ε from 3 to 23",
    )(
        Study(
            paper="byz-clip21",
            figures=f"Figure {_number}",
            places=partial(figure_places, attack=_attack),
            left_out="54 of 60 epochs; seeds 2 and 3; the CNN; f but 5; ε but 13; steps but γτ = 1e-3",
            kept=lambda place: (
                place.table.startswith("MLP, f = 5")
                and place.column == "ε = 13"
                and math.isclose(_product(place), 1e-4 if place.row.startswith("Byz-Clip21") else 1e-3)
            ),
            shorter=("run.rounds=282",),
        )
    )

studies.register(
    "byz-clip21-figureF1", "Byz-Clip21-SGD2M+, Figure F.1: subsampled batches, LF, ε from 0.1 to 3"
)(
    Study(
        paper="byz-clip21",
        figures="Figure F.1",
        places=amplified_places,
        left_out="27 of 30 epochs; seeds 2 and 3; the CNN; all f but 5; all ε but 1; step sizes but γ = 0.1",
        kept=lambda place: (
            place.table.startswith("MLP, f = 5")
            and place.column == "ε = 1"
            and math.isclose(_product(place), 0.1 * INNER_CLIP)
        ),
        shorter=("run.rounds=141",),
    )
)
