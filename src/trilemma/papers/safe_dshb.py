"""SAFE-DSHB on phishing: three privacy regimes × four attacks × rules (ICML 2023, Section 6).

What can be read off the paper's curves is in `published/safe-dshb.toml`.
"""

from __future__ import annotations

from trilemma.config import load
from trilemma.papers.grid import Place
from trilemma.papers.study import Study, studies

EPSILON = {1: 1.14, 2: 0.32, 3: 0.19}
"""The printed ε of each noise multiplier (Poisson convention, δ = 1e-4)."""

ATTACKS = {
    "ALIE (searched)": ("attack.name=alie", "attack.strength=search"),
    "FOE (searched)": ("attack.name=foe", "attack.strength=search"),
    "SF": ("attack={name='sf'}",),
    "LF": ("attack={name='lf'}",),
}


def places(seeds: str) -> list[Place]:
    """Return the grid."""
    base = load("safe-dshb-phishing", [f"run.seeds='{seeds}'"])
    grid = []
    for multiplier, epsilon in EPSILON.items():
        regime = base.with_(f"privacy.noise_multiplier={multiplier}")
        table = f"noise multiplier {multiplier} (printed ε = {epsilon})"
        # Without adversaries the paper's baseline is DP-DSGD: no momentum, everyone honest.
        free = regime.with_(
            "federation.byzantine=0", "federation.clients=4", "aggregation.rule=mean", "attack={name='none'}"
        )
        for attack, changes in ATTACKS.items():
            for rule in ("smea", "filter", "caf", "mean"):
                settings = regime.with_(f"aggregation.rule={rule}", *changes)
                grid.append(Place(table, rule, attack, settings))
        grid.append(Place(table, "nobody lies, mean", "no attack", free))
        grid.append(Place(table, "nobody lies, DP-DSGD", "no attack", free.with_("algorithm.momentum=0.0")))
    return grid


studies.register("safe-dshb", "SAFE-DSHB on phishing: three noises × four attacks × rules")(
    Study(
        paper="safe-dshb",
        figures="the figures of Section 6",
        places=places,
        left_out="seeds 2 and 3; CAF; noise multiplier 2",
        kept=lambda place: place.row != "caf" and "multiplier 2" not in place.table,
    )
)
