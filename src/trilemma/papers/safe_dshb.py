"""SAFE-DSHB on phishing: three privacy regimes × four attacks × rules (ICML 2023, Section 6).

The paper shows curves; read off: SMEA and Filter reach about 80 % at noise multipliers 1 and 2, about 75 % at
3, a little less under FOE; DP-DSGD without adversaries is the ceiling.
"""

from __future__ import annotations

from trilemma.config import load
from trilemma.papers.grid import Cell

EPSILON = {1: 1.14, 2: 0.32, 3: 0.19}
"""The printed ε of each noise multiplier (Poisson convention, δ = 1e-4)."""

ATTACKS = {
    "ALIE (searched)": ("attack.name=alie", "attack.strength=search"),
    "FOE (searched)": ("attack.name=foe", "attack.strength=search"),
    "SF": ("attack={name='sf'}",),
    "LF": ("attack={name='lf'}",),
}
READ_OFF = {1: "≈ 80", 2: "≈ 80", 3: "≈ 75"}


def cells(seeds: str) -> list[Cell]:
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
                published = READ_OFF[multiplier] if rule in ("smea", "filter") else ""
                settings = regime.with_(f"aggregation.rule={rule}", *changes)
                grid.append(Cell(table, rule, attack, settings, published))
        grid.append(Cell(table, "nobody lies, mean", "no attack", free))
        grid.append(Cell(table, "nobody lies, DP-DSGD", "no attack", free.with_("algorithm.momentum=0.0")))
    return grid
