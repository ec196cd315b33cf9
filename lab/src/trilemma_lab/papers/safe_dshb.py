"""SAFE-DSHB on phishing: three privacy regimes × attacks × rules (ICML 2023), and other readings of it.

    safe-dshb           the appendix's six figures: accuracy and training loss in three regimes
    safe-dshb-main      the earlier version's main-text figure: σ_NM = 7.5, γ = 2, C = 0.01, FOE and LF
    safe-dshb-summed    the six figures with a momentum that adds gradients up: m ← β m + g
    safe-dshb-whole     the six figures with nothing held out: m = 11055/4, as the printed ε have it
    safe-dshb-signs     FOE where its strength is searched on either side of 0, beside τ > 0
    safe-dshb-terms     what each term of the lower bound costs (Theorem 3.1), one quantity at a time

The loss is stated (binary cross-entropy), the split is not, and momentum is stated as an average. A sum is
100 times the average at β = 0.99; every rule and every attack here scales with its messages, so it is the
average with 100 times the step. What the paper says of its curves' ends is in `published/safe-dshb.toml`.
The lower bound is d/(ε²nm²) + (f/n)/(ε²m²) + (f/n)G²: privacy, what liars make of it, and liars alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from functools import partial

from trilemma.base.records import Spread
from trilemma.experiment import Config, load
from trilemma.report import Result
from trilemma_lab.studies.grid import SEARCHED, Place
from trilemma_lab.studies.study import Study, studies

EPSILON = {1: 1.14, 2: 0.32, 3: 0.19}
"""The printed ε of each noise multiplier (Poisson convention, δ = 1e-4)."""

ATTACKS = {
    "ALIE (searched)": ("attack.name=alie", "attack.strength=search", SEARCHED),
    "FOE (searched)": ("attack.name=foe", "attack.strength=search", SEARCHED),
    "SF": ("attack={name='sf'}",),
    "LF": ("attack={name='lf'}",),
}

NOBODY_LIES = (
    "federation.byzantine=0",
    "federation.clients=4",
    "aggregation.rule=mean",
    "attack={name='none'}",
)

LAST = 20
"""Rounds at the end over which the training loss is averaged: one batch's loss is noise."""


def measure(result: Result) -> Mapping[str, Spread]:
    """Return the scores and the training loss at the end."""
    found = result.summary
    ends = {
        seed: [r.train_loss for r in result.seeds[seed][-LAST:] if r.train_loss is not None]
        for seed in result.config.run.seeds
    }
    lost = {seed for seed, losses in ends.items() if str(seed) in found.diverged or not losses}
    losses = {seed: None if seed in lost else round(statistics.fmean(end), 6) for seed, end in ends.items()}
    return {**found.metrics, "train_loss": Spread.of(losses)}


def places(seeds: str, changes: tuple[str, ...] = ()) -> list[Place]:
    """Return the six figures' grid, with changes."""
    base = load("safe-dshb-phishing", [f"run.seeds='{seeds}'", *changes])
    grid = []
    for multiplier, epsilon in EPSILON.items():
        regime = base.with_(f"privacy.noise_multiplier={multiplier}")
        grid += _regime(regime, f"noise multiplier {multiplier} (printed ε = {epsilon})", ATTACKS)
    return grid


def _regime(regime: Config, table: str, attacks: Iterable[str]) -> list[Place]:
    """Return one regime: rules × attacks, and what nobody lying gives with momentum and without."""
    grid = [
        Place(table, rule, attack, regime.with_(f"aggregation.rule={rule}", *ATTACKS[attack]))
        for attack in attacks
        for rule in ("smea", "filter", "caf", "mean")
    ]
    # Without adversaries the paper's baseline is DP-DSGD: no momentum, everyone honest. Its step is the
    # paper's also where momentum adds up.
    free = regime.with_(*NOBODY_LIES)
    plain = free.with_("algorithm.momentum=0.0", *(["algorithm.lr=1.0"] if _summed(regime) else []))
    grid.append(Place(table, "nobody lies, mean", "no attack", free))
    grid.append(Place(table, "nobody lies, DP-DSGD", "no attack", plain))
    return grid


SUMMED = "algorithm.lr=100.0"
"""γ = 1 over 1 − β = 0.01: the step with which a momentum that averages is one that adds up."""


def _summed(config: Config) -> bool:
    return bool(config.dump()["algorithm"]["lr"] == 100.0)


def main_places(seeds: str) -> list[Place]:
    """Return the earlier version's main-text figure."""
    changes = ["algorithm.lr=2.0", "privacy.clip=0.01", "privacy.noise_multiplier=7.5"]
    base = load("safe-dshb-phishing", [f"run.seeds='{seeds}'", *changes])
    return _regime(base, "noise multiplier 7.5, γ = 2, C = 0.01 (printed ε = 0.07)", ("FOE (searched)", "LF"))


EITHER_SIGN = "attack.search={sides='both', points=41, refinements=24, passes=48}"
"""The package's own search: the strength farthest from the honest mean may be one that pushes ahead."""


def sign_places(seeds: str) -> list[Place]:
    """Return FOE at the strongest noise of both figures, its strength searched in two ways."""
    base = load("safe-dshb-phishing", [f"run.seeds='{seeds}'", *ATTACKS["FOE (searched)"]])
    regimes = {
        "noise multiplier 3": ["privacy.noise_multiplier=3"],
        "noise multiplier 7.5, γ = 2, C = 0.01": [
            "algorithm.lr=2.0",
            "privacy.clip=0.01",
            "privacy.noise_multiplier=7.5",
        ],
    }
    return [
        Place(table, rule, column, base.with_(*changes, f"aggregation.rule={rule}", search))
        for table, changes in regimes.items()
        for rule in ("smea", "filter")
        for column, search in (("τ > 0", SEARCHED), ("τ of either sign", EITHER_SIGN))
    ]


MULTIPLIERS = (0, 1, 2, 4, 8)
SHARES_HELD_BACK = (0.2, 0.6, 0.8, 0.9)
"""Test fractions of a random split: 2,211, 1,106, 553 and 276 examples a client are left."""


def term_places(seeds: str) -> list[Place]:
    """Return a table for each term: one of ε, f, m and G varies, the rest stands still."""
    base = load("safe-dshb-phishing", [f"run.seeds='{seeds}'", SEARCHED])
    return [*_noise(base), *_liars(base), *_examples(base)]


def _noise(base: Config) -> list[Place]:
    """d/(ε²nm²): noise alone, nobody lies."""
    table = "privacy: noise grows, nobody lies"
    free = base.with_(*NOBODY_LIES)
    return [Place(table, "mean", f"σ = {z}", free.with_(_noised(z))) for z in MULTIPLIERS]


def _liars(base: Config) -> list[Place]:
    """(f/n)/(ε²m²) and (f/n)G²: f of 4 + f clients lie, on even and uneven data, without and with noise."""
    grid = []
    for data, partition in (("even", "homogeneous"), ("uneven", "extreme")):
        for z in (0, 2):
            table = f"liars: f grows, {data} data, σ = {z}"
            for f in range(4):
                liars = (f"federation.byzantine={f}", f"federation.clients={4 + f}")
                attack = ATTACKS["ALIE (searched)"] if f else ("attack={name='none'}",)
                changes = (*liars, *attack, f"data.partition='{partition}'", _noised(z))
                grid += [
                    Place(table, rule, f"f = {f}", base.with_(*changes, f"aggregation.rule={rule}"))
                    for rule in ("smea", "caf")
                ]
    return grid


def _examples(base: Config) -> list[Place]:
    """M: the same ε costs more noise where a client holds less."""
    table = "examples: m shrinks at a certified ε of 0.5"
    grid = []
    for held_back in SHARES_HELD_BACK:
        examples = round((1 - held_back) * 11055 / 4)
        private = (
            f"data={{name='phishing', split='random', test_fraction={held_back}, partition='homogeneous'}}",
            "privacy={threat='ldp', clip=1.0, epsilon=0.5, delta=1e-4}",
        )
        column = f"m ≈ {examples}"
        grid.append(Place(table, "nobody lies, mean", column, base.with_(*private, *NOBODY_LIES)))
        grid.append(Place(table, "smea, f = 3, ALIE", column, base.with_(*private)))
    return grid


def _noised(multiplier: float) -> str:
    """Return `[privacy]` for a noise multiplier; none at 0, gradients clipped all the same."""
    if not multiplier:
        return "privacy={threat='none', clip=1.0}"
    return f"privacy={{threat='ldp', clip=1.0, noise_multiplier={multiplier}, delta=1e-4}}"


SEEDS = "1-10"
"""The paper has five; runs are short, and under FOE three seeds understate the spread."""

for _name, _summary, _changes in (
    ("safe-dshb", "three noises × four attacks × rules", ()),
    ("safe-dshb-summed", "the same with a momentum that adds up", (SUMMED,)),
    (
        "safe-dshb-whole",
        "the same with nothing held out, tested on what is trained on",
        ("data.split='all'",),
    ),
):
    studies.register(_name, f"SAFE-DSHB on phishing: {_summary}")(
        Study(
            paper="safe-dshb",
            figures="the six figures of its experiments: accuracy and training loss in three regimes",
            places=partial(places, changes=_changes),
            measure=measure,
            left_out="seeds 2 to 10; CAF; noise multiplier 2",
            kept=lambda place: place.row != "caf" and "multiplier 2" not in place.table,
            seeds=SEEDS,
        )
    )

studies.register("safe-dshb-main", "SAFE-DSHB on phishing: the earlier version's main-text figure")(
    Study(
        paper="safe-dshb",
        figures="the main-text figure of its earlier version",
        places=main_places,
        measure=measure,
        left_out="seeds 2 to 10; CAF",
        kept=lambda place: place.row != "caf",
        seeds=SEEDS,
    )
)

studies.register("safe-dshb-signs", "SAFE-DSHB on phishing: FOE with a strength of either sign")(
    Study(
        paper="safe-dshb",
        figures="no figure: how FOE's strength is searched",
        places=sign_places,
        measure=measure,
        left_out="seeds 2 to 10; SMEA",
        kept=lambda place: place.row == "filter",
        seeds=SEEDS,
    )
)

studies.register(
    "safe-dshb-terms", "SAFE-DSHB on phishing: what ε, f, m and uneven data cost, one at a time"
)(
    Study(
        paper="safe-dshb",
        figures="Theorem 3.1, term by term",
        places=term_places,
        measure=measure,
        left_out="seeds 2 and 3; every other value",
        kept=lambda place: (
            place.column in ("σ = 0", "σ = 2", "σ = 8", "f = 0", "f = 3", "m ≈ 2211", "m ≈ 276")
        ),
    )
)
