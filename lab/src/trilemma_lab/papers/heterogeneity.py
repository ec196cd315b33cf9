"""CafCor's rule against others where clients' data differ, Figures 2 and 7 to 12 (ICML 2025).

Ten honest clients, central noise on examples at ε = 13.7. The paper prints b, C and T here and neither γ nor
β: they are those of Figure 1 for each data set. SMEA it shows on MNIST alone.
"""

from __future__ import annotations

from functools import partial

from trilemma.experiment import Config, load
from trilemma_lab.papers.cafcor import ATTACKS
from trilemma_lab.studies.grid import Place
from trilemma_lab.studies.study import Study, studies

PARTITIONS = {
    "extreme": ("cafcor-mnist-extreme", 7, 10),
    "Dirichlet(0.1)": ("cafcor-mnist-dirichlet-0.1", 8, 11),
    "Dirichlet(1)": ("cafcor-mnist-dirichlet-1", 9, 12),
}
"""The ready configuration of each partition, and the paper's figure for MNIST and for Fashion-MNIST."""

RULES = {
    "CAF": "caf",
    "SMEA": "smea",
    "CWTM": "cwtm",
    "CWMED": "cwmed",
    "GM": "geomed",
    "Multi-Krum": "multikrum",
    "Meamed": "meamed",
}

FASHION = (
    "data.name=fashion-mnist",
    "data.scaling=unit",
    "data.flip=true",
    "algorithm.lr=0.3",
    "algorithm.momentum=0.9",
)
"""What differs from MNIST's configurations."""


def places(seeds: str, fashion: bool) -> list[Place]:
    """Return the grids of one data set."""
    grid = []
    for partition, (ready, on_mnist, on_fashion) in PARTITIONS.items():
        base = load(ready, [f"run.seeds='{seeds}'", *(FASHION if fashion else ())])
        figure = on_fashion if fashion else on_mnist
        table = f"{base.data.name}, {partition}, 10 honest, f = {base.federation.byzantine} (Figure {figure})"
        grid += _rules(base, table, [name for name in RULES if not (fashion and name == "SMEA")])
    return grid


def _rules(base: Config, table: str, rules: list[str]) -> list[Place]:
    free = base.with_(
        "federation.byzantine=0", "federation.clients=10", "aggregation.rule=mean", "attack={name='none'}"
    )
    attacked = [
        Place(table, row, attack, base.with_(f"aggregation.rule={RULES[row]}", *changes))
        for attack, changes in ATTACKS.items()
        for row in rules
    ]
    return [Place(table, "nobody lies, mean", "no attack", free), *attacked]


for _fashion, _name, _first in ((False, "mnist", 7), (True, "fashion", 10)):
    studies.register(
        f"cafcor-rules-{_name}",
        f"CafCor, Figures 2 and {_first} to {_first + 2}: rules × attacks on uneven data, {_name}",
    )(
        Study(
            paper="cafcor",
            figures=f"Figures 2 and {_first} to {_first + 2}",
            places=partial(places, fashion=_fashion),
            seeds="1-5",
            left_out="360 of 400 rounds; seeds 2 to 5; rules but CAF, CWTM and Meamed; attacks but LF "
            "and SF; partitions but Dirichlet(1)",
            kept=lambda place: (
                place.column in ("no attack", "LF", "SF")
                and place.row in ("nobody lies, mean", "CAF", "CWTM", "Meamed")
                and "Dirichlet(1)" in place.table
            ),
            shorter=("run.rounds=40",),
        )
    )
