"""CafCor on MNIST and Fashion-MNIST, Figures 1 and 3 to 6: threat models × attacks at one ε (ICML 2025).

A study for each data set, with a table for f = 5 (Figures 3 and 5) and one for f = 10 (Figures 4 and 6);
Figure 1 is the ALIE panel of all four. What the paper reports is in `published/cafcor.toml`. Its rules under
heterogeneity are in `heterogeneity.py`, its Table 1 in `costs.py`.
"""

from __future__ import annotations

from functools import partial

from trilemma.experiment import Config, load
from trilemma_lab.studies.grid import SEARCHED, Place
from trilemma_lab.studies.study import Study, studies

ATTACKS = {
    "SF": ("attack={name='sf'}",),
    "LF": ("attack={name='lf'}",),
    "ALIE (τ 1.5)": ("attack={name='alie', strength=1.5}",),
    "ALIE (searched)": ("attack={name='alie', strength='search'}", SEARCHED),
    "FOE (searched)": ("attack={name='foe', strength='search'}", SEARCHED),
}
RULES = {
    "CafCor-SecLDP": ("secldp", "caf"),
    "CafCor-ByzLDP": ("byzldp", "caf"),
    "mean, SecLDP noise": ("secldp", "mean"),
    "CafCor-CDP": ("cdp", "caf"),
    "CafCor-LDP": ("ldp", "caf"),
}
APPENDIX = ("CafCor-CDP", "CafCor-LDP")
"""Rows of Figures 3 to 6 alone, under the paper's four attacks."""
SHOWN = ("SF", "LF", "ALIE (τ 1.5)", "FOE (searched)")
LIARS = {
    "mnist": (("cafcor-mnist", ()), ("cafcor-mnist-f10", ())),
    "fashion": (("cafcor-fashion", ()), ("cafcor-fashion", ("federation.byzantine=10",))),
}
"""The ready configurations of each data set with f = 5 and 10, and what is changed in them."""


def places(seeds: str, name: str) -> list[Place]:
    """Return the grids of one data set, "mnist" or "fashion"."""
    bases = [load(ready, [f"run.seeds='{seeds}'", *changes]) for ready, changes in LIARS[name]]
    return [place for base in bases for place in _grid(base)]


def _grid(base: Config) -> list[Place]:
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
            if row in APPENDIX and attack not in SHOWN:
                continue
            settings = base.with_(f"privacy.threat={threat}", f"aggregation.rule={rule}", *changes)
            grid.append(Place(table, row, attack, settings))
    return grid


def both_places(seeds: str) -> list[Place]:
    """Return Figure 5's ALIE panel with standardised pixels and momentum started at the first gradient."""
    changed = ("data.scaling=standard", "algorithm.start=first")
    table = "fashion-mnist, n = 100, f = 5, printed ε = 39.6"
    shown = [place for place in places(seeds, "fashion") if place.table == table]
    kept = ("no attack", "ALIE (τ 1.5)")
    return [
        place.with_(*changed) for place in shown if place.column in kept and place.row != "mean, SecLDP noise"
    ]


studies.register(
    "cafcor-fashion-both", "CafCor, Figure 1 on Fashion-MNIST: standardised pixels and momentum's start"
)(
    Study(
        paper="cafcor",
        figures="Figure 1, by two readings of what is not said",
        places=both_places,
        left_out="seeds 2 to 5; all but DSGD-CDP",
        seeds="1-5",
        kept=lambda place: place.row == "DSGD-CDP",
    )
)

for _name, _figures in (("mnist", "3 and 4"), ("fashion", "5 and 6")):
    studies.register(
        f"cafcor-{_name}", f"CafCor, Figures 1, {_figures}: threat models × attacks, f = 5 and 10, {_name}"
    )(
        Study(
            paper="cafcor",
            figures=f"Figures 1, {_figures}",
            places=partial(places, name=_name),
            left_out="f = 10; seeds 2 to 5; all attacks but ALIE at strength 1.5; the plain mean",
            seeds="1-5",
            kept=lambda place: (
                place.column in ("no attack", "ALIE (τ 1.5)")
                and place.row.startswith(("DSGD", "CafCor"))
                and "f = 5" in place.table
            ),
        )
    )
