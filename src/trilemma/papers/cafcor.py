"""CafCor on MNIST and Fashion-MNIST, Figure 1 and its kin: threat models × attacks at one ε (ICML 2025).

Printed for f = 5 under ALIE: CafCor-SecLDP = DSGD-CDP = 83 % on MNIST and 72 % on Fashion-MNIST; ByzLDP 8
points lower on MNIST, level on Fashion-MNIST; DSGD-LDP stays under 30 %.
"""

from __future__ import annotations

from trilemma.config import load
from trilemma.papers.grid import Cell

ATTACKS = {
    "SF": ("attack={name='sf'}",),
    "LF": ("attack={name='lf'}",),
    "ALIE (τ 1.5)": ("attack={name='alie', strength=1.5}",),
    "ALIE (searched)": ("attack={name='alie', strength='search'}",),
    "FOE (searched)": ("attack={name='foe', strength='search'}",),
}
PRINTED = {
    "mnist": {"DSGD-CDP": "83", "DSGD-LDP": "< 30", "CafCor-SecLDP": "83", "CafCor-ByzLDP": "75"},
    "fashion": {"DSGD-CDP": "72", "DSGD-LDP": "< 30", "CafCor-SecLDP": "72", "CafCor-ByzLDP": "72"},
}
RULES = {"CafCor-SecLDP": ("secldp", "caf"), "CafCor-ByzLDP": ("byzldp", "caf"), "mean": ("secldp", "mean")}


def cells(seeds: str, name: str = "mnist") -> list[Cell]:
    """Return the grid of one data set, "mnist" or "fashion", for f = 5."""
    base = load(f"cafcor-{name}", [f"run.seeds='{seeds}'"])
    table = f"{base.data.name}, n = 100, f = {base.federation.byzantine}, printed ε = {base.privacy.epsilon}"
    grid = []
    for threat in ("cdp", "ldp"):
        row = f"DSGD-{threat.upper()}"
        settings = base.with_(
            "algorithm.name=dsgd",
            "aggregation.rule=mean",
            "federation.byzantine=0",
            "attack={name='none'}",
            f"privacy.threat={threat}",
        )
        grid.append(Cell(table, row, "no attack", settings, PRINTED[name][row]))
    for row, (threat, rule) in RULES.items():
        for attack, changes in ATTACKS.items():
            settings = base.with_(f"privacy.threat={threat}", f"aggregation.rule={rule}", *changes)
            printed = PRINTED[name].get(row, "") if attack.startswith("ALIE") else ""
            grid.append(Cell(table, row, attack, settings, printed))
    return grid
