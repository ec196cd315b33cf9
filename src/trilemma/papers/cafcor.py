"""CafCor on MNIST and Fashion-MNIST, Figure 1 and its kin: threat models × attacks at one ε (ICML 2025).

What the paper reports is in `published/cafcor.toml`.
"""

from __future__ import annotations

from functools import partial

from trilemma.config import load
from trilemma.papers.grid import Place
from trilemma.papers.study import Study, studies

ATTACKS = {
    "SF": ("attack={name='sf'}",),
    "LF": ("attack={name='lf'}",),
    "ALIE (τ 1.5)": ("attack={name='alie', strength=1.5}",),
    "ALIE (searched)": ("attack={name='alie', strength='search'}",),
    "FOE (searched)": ("attack={name='foe', strength='search'}",),
}
RULES = {
    "CafCor-SecLDP": ("secldp", "caf"),
    "CafCor-ByzLDP": ("byzldp", "caf"),
    "mean, SecLDP noise": ("secldp", "mean"),
}


def places(seeds: str, name: str) -> list[Place]:
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
        grid.append(Place(table, row, "no attack", settings))
    for row, (threat, rule) in RULES.items():
        for attack, changes in ATTACKS.items():
            settings = base.with_(f"privacy.threat={threat}", f"aggregation.rule={rule}", *changes)
            grid.append(Place(table, row, attack, settings))
    return grid


for _name in ("mnist", "fashion"):
    studies.register(f"cafcor-{_name}", f"CafCor, Figure 1: threat models × attacks, f = 5, {_name}")(
        Study(
            paper="cafcor",
            figures="Figure 1 and those of its kin with f = 5",
            places=partial(places, name=_name),
            left_out="seeds 2 and 3; all attacks but ALIE at strength 1.5; the plain mean",
            kept=lambda place: (
                place.column in ("no attack", "ALIE (τ 1.5)") and place.row.startswith(("DSGD", "CafCor"))
            ),
        )
    )
