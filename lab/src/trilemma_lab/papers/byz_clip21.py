"""Byz-Clip21-SGD2M on MNIST: Figures 1, 2 and F.1 as the paper sets them, and what noise laws do to them.

    Figure 1    20 regular clients share MNIST, liars come on top, IPM × −10; b = 64 (MLP), 32 (CNN)
    Figure 2    25 clients hold 2,400 examples each, f of them flip labels; b = 32; 60 epochs = 4,500 rounds
    Figure F.1  as Figure 2, every example's gradient clipped, 30 epochs = 2,250 rounds

Section 6 sets σ_ω = τ √(T log(1/δ)) / ε, "where T is the total number of iterations": `noise = "paper"`. For
every algorithm γ is tuned over {10, …, 1e-3} and τ over {1, …, 1e-5}; one seed chooses, three are reported.
Of those 30 points the 15 with τ ≥ 1e-2 are run, for all algorithms alike: where every vector is longer than τ
a smaller τ with a larger γ is the same experiment, since rules here are homogeneous and noise is a multiple
of τ (`lab/tests/papers/test_papers_byz_clip21.py`), and γτ < 1e-5 moves nothing.

Figure 1 does not say how many epochs it has; Figure 2's 60 are taken. No accuracy is printed: the figures are
curves, whose ticks are all that our text of the paper has. What it says in words is in `published/`.

Figure F.1 sets σ_ω = τ_i (S/m) √(T log(1/δ)) / ε "following Abadi et al.", who add noise to the sum of S
gradients. Algorithm 5 adds ω to their mean. Both readings are tables of their own.

The study `byz-clip21` is older: three noise laws at ε = 13, among them a milder one, T in epochs, which once
was taken for the paper's. Its grids were not the same for all algorithms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from trilemma.experiment import Config, load
from trilemma_lab.studies.grid import Place
from trilemma_lab.studies.study import Study, studies

EPSILON, DELTA, EPOCHS = 13.0, 4e-4, 60
EPSILONS = (3.0, 8.0, 13.0, 18.0, 23.0)
GRID = tuple(itertools.product((10.0, 1.0, 0.1, 0.01, 0.001), (1.0, 0.1, 0.01)))
"""γ and τ of Figures 1 and 2, for every algorithm."""

ALGORITHMS = {
    "Byz-Clip21-SGD2M": "name='byz-clip21-sgd2m', beta=0.1, beta_hat=0.01",
    "Byz-Clip-SGD": "name='byz-clip-sgd'",
    "SAFE-DSHB": "name='safe-dshb', unit='user', momentum=0.9",
}
ATTACKS = {"IPM": "attack={name='ipm', strength=10.0}", "LF": "attack={name='lf'}"}


@dataclass(frozen=True)
class Panel:
    """A row of panels of a figure: a model, its batch size, its rounds and how many lie in each.

    >>> IPM_PANELS[1].rounds, LF_PANELS[0].rounds
    (2820, 4500)
    """

    model: str
    batch: int
    liars: tuple[int, ...]
    examples: int
    """What a client holds."""
    epochs: int = EPOCHS

    @property
    def rounds(self) -> int:
        """T: an epoch takes as many rounds as batches go into what a client holds."""
        return self.epochs * math.ceil(self.examples / self.batch)


IPM_PANELS = (Panel("cnn", 32, (2, 5, 7), 3000), Panel("mlp", 64, (2, 5, 8), 3000))
LF_PANELS = (Panel("cnn", 32, (1, 5, 10), 2400), Panel("mlp", 32, (1, 5, 10), 2400))
AMPLIFIED_PANELS = tuple(Panel(one.model, 32, one.liars, 2400, epochs=30) for one in LF_PANELS)
"""The text names no panel of Figure 2: they are taken to be those of Figure F.1."""


def figure_places(seeds: str, attack: str) -> list[Place]:
    """Return Figure 1 (IPM) or 2 (LF): three algorithms × ε, the whole grid of γ and τ at each place."""
    grid = []
    for panel in IPM_PANELS if attack == "IPM" else LF_PANELS:
        for f in panel.liars:
            base = _panel("byz-clip21-mnist-mlp", panel, f, attack, seeds)
            table = f"{panel.model.upper()}, f = {f}, {attack}"
            for epsilon, (row, algorithm) in itertools.product(EPSILONS, ALGORITHMS.items()):
                for lr, clip in GRID:
                    said = f"threat='ldp', delta={DELTA}, clip={clip}, epsilon={epsilon}, noise='paper'"
                    settings = base.with_(
                        f"algorithm={{{algorithm}, lr={lr}, batch_size={panel.batch}}}", f"privacy={{{said}}}"
                    )
                    grid.append(Place(table, row, f"ε = {epsilon:g}", settings))
    return grid


AMPLIFIED = {
    "Byz-Clip21-SGD2M+": "name='byz-clip21-sgd2m+', beta=0.1, beta_hat=0.01, outer_clip=1.0",
    "Byz-Clip-SGD": "name='byz-clip-sgd', unit='example'",
    "SAFE-DSHB": "name='safe-dshb', unit='example', momentum=0.9",
}
"""Figure F.1: every example's gradient is clipped, batches are subsampled."""

AMPLIFIED_GRID = tuple(itertools.product((10.0, 1.0, 0.1, 0.01), (1.0, 0.3, 0.1, 0.03, 0.01)))
"""γ and τ_i of Figure F.1, for every algorithm."""


def amplified_noise(clip: float, panel: Panel, epsilon: float, on: str) -> str:
    """Return the `[privacy]` setting of Figure F.1's noise, added to the mean or to the sum of a batch.

    >>> amplified_noise(0.1, AMPLIFIED_PANELS[1], 1.0, "mean")
    "epsilon=1.0, noise='paper'"
    >>> amplified_noise(0.1, AMPLIFIED_PANELS[1], 1.0, "sum")
    'sigma_ind=0.0055284'
    """
    if on == "mean":
        return f"epsilon={epsilon}, noise='paper'"
    rate = panel.batch / panel.examples
    sigma = clip * rate * math.sqrt(panel.rounds * math.log(1 / DELTA)) / epsilon
    return f"sigma_ind={sigma / panel.batch:.5g}"


def amplified_places(seeds: str) -> list[Place]:
    """Return Figure F.1: three algorithms × ε under label flipping, by both readings of its noise."""
    grid = []
    for panel, on in itertools.product(AMPLIFIED_PANELS, ("sum", "mean")):
        for f in panel.liars:
            base = _panel("byz-clip21-plus-mnist", panel, f, "LF", seeds)
            table = f"{panel.model.upper()}, f = {f}, LF, noise on the {on}"
            for epsilon, (row, algorithm) in itertools.product((0.1, 0.3, 1.0, 3.0), AMPLIFIED.items()):
                for lr, clip in AMPLIFIED_GRID:
                    noise = amplified_noise(clip, panel, epsilon, on)
                    settings = base.with_(
                        f"algorithm={{{algorithm}, lr={lr}, batch_size={panel.batch}}}",
                        f"privacy={{threat='ldp', delta={DELTA}, clip={clip}, {noise}}}",
                    )
                    grid.append(Place(table, row, f"ε = {epsilon:g}", settings))
    return grid


def _panel(ready: str, panel: Panel, f: int, attack: str, seeds: str) -> Config:
    """Return the settings of a panel: under IPM liars join 20 regular clients, under LF they are of 25."""
    clients, holders = (20 + f, "honest") if attack == "IPM" else (25, "all")
    return load(
        ready,
        [
            ATTACKS[attack],
            f"model={{name='{panel.model}'}}",
            f"data.holders='{holders}'",
            f"federation={{clients={clients}, byzantine={f}}}",
            f"run.rounds={panel.rounds}",
            f"run.evaluate_every={panel.rounds // 30}",
            f"run.seeds='{seeds}'",
        ],
    )


STEPS = (1e-2, 1e-3, 1e-4, 1e-5)
LAW_ROWS = {
    "Byz-Clip21-SGD2M (γτ/10)": (ALGORITHMS["Byz-Clip21-SGD2M"], 1e-3, 0.1),
    "Byz-Clip-SGD": (ALGORITHMS["Byz-Clip-SGD"], 1e-2, 1.0),
    "SAFE-DSHB": (ALGORITHMS["SAFE-DSHB"], 1e-2, 1.0),
}
"""Algorithm, its τ, and its share of γτ: in this study grids are not the same for all."""

LAWS = {
    "certified": "epsilon={epsilon}",
    "paper's law": "epsilon={epsilon}, noise='paper'",
    "a milder law, T in epochs": "sigma_ind={milder:.5g}",
}


def law_places(seeds: str) -> list[Place]:
    """Return the grid of noise laws for f = 5 of 25, the MLP, at ε = 13."""
    base = load("byz-clip21-mnist-mlp", [f"run.seeds='{seeds}'"])
    grid = []
    for (attack, attacked), (law, said) in itertools.product(ATTACKS.items(), LAWS.items()):
        table = f"MNIST, MLP, 20 honest, f = 5, {attack}, noise: {law}"
        for row, (algorithm, clip, share) in LAW_ROWS.items():
            milder = clip * math.sqrt(EPOCHS * math.log(1 / DELTA)) / EPSILON
            noise = said.format(epsilon=EPSILON, milder=milder)
            for step in STEPS:
                settings = base.with_(
                    attacked,
                    f"algorithm={{{algorithm}, batch_size=64, lr={step * share / clip:.6g}}}",
                    f"privacy={{threat='ldp', delta={DELTA}, clip={clip}, {noise}}}",
                )
                grid.append(Place(table, row, f"γτ = {step:g}", settings))
    return grid


def _kept(place: Place, column: str, points: Sequence[tuple[float, float]]) -> bool:
    said = place.config.dump()
    point = (said["algorithm"]["lr"], said["privacy"]["clip"])
    return place.table.startswith("MLP, f = 5") and place.column == column and point in points


studies.register("byz-clip21", "Byz-Clip21-SGD2M on MNIST at ε = 13: three noise laws, one of them milder")(
    Study(
        paper="byz-clip21",
        figures="Figures 1 and 2, the MLP with f = 5, by other laws than the paper's too",
        places=law_places,
        left_out="54 of 60 epochs; seeds 2 and 3; label flipping; step sizes but γτ = 1e-3 and 1e-4; noise "
        "but the paper's",
        kept=lambda place: (
            "IPM" in place.table
            and place.column in ("γτ = 0.001", "γτ = 0.0001")
            and place.table.endswith("paper's law")
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
            left_out="54 of 60 epochs; seeds 2 and 3; the CNN; f but 5; ε but 23; points but γ = τ = 0.01",
            kept=partial(_kept, column="ε = 23", points=[(0.01, 0.01)]),
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
        left_out="27 of 30 epochs; seeds 2 and 3; the CNN; f but 5; ε but 1; points but γ = τ = 0.1",
        kept=partial(_kept, column="ε = 1", points=[(0.1, 0.1)]),
        shorter=("run.rounds=225",),
    )
)
