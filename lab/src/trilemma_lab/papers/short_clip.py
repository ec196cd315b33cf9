"""How short a clip should be, against liars who prove their contribution's length and their noise.

    short-clip          phishing (a client's data protected; a record protected), features of MNIST and of
                        Fashion-MNIST, against `bounded` in both directions and `ring`

Rows are clips that stay, and clips that follow a quantile from C = 1 on. No step here was searched for: with
an ε as target it follows from public numbers by the rule of `trilemma.experiment.auto`, γ ∝ 1/C. So a shorter
clip takes steps of the same length with the same noise; only who pulls how hard is changed by it. Ours, not a
paper's. The liars are those whom proofs of length and noise (GOPA) would leave.
"""

from __future__ import annotations

from collections.abc import Mapping

from trilemma.experiment import Config, parse
from trilemma_lab.studies.grid import Place
from trilemma_lab.studies.study import Study, studies

LONG, SHORT = 2.25, 0.1
"""The clip of CafCor's experiments, and one that is shorter than nearly every gradient of a client."""

CLIPS: Mapping[str, tuple[str, ...]] = {
    f"C = {LONG}": (f"privacy.clip={LONG}",),
    "C = 0.5": ("privacy.clip=0.5",),
    f"C = {SHORT}": (f"privacy.clip={SHORT}",),
    "follows the median": ("privacy.clip=1.0", "algorithm.quantile=0.5"),
    "follows the tenth": ("privacy.clip=1.0", "algorithm.quantile=0.1"),
}
"""Rows, and what they say."""

PHISHING = ("data={name='phishing', partition='homogeneous'}", "model={name='logistic'}")

FEATURES = ("data.features='scattering'", "data.project=128", "model={name='multinomial'}")

GROUNDS: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "phishing, a client protected: secldp, ε = 27.8, n = 20": (
        (2, 4),
        (
            *PHISHING,
            "federation.clients=20",
            "algorithm={name='cafcor', momentum=0.85}",
            "privacy={threat='secldp', epsilon=27.8, delta=1e-4}",
            "run.rounds=30",
        ),
    ),
    "phishing, a record protected: ldp, ε = 2, n = 20": (
        (2, 4),
        (
            *PHISHING,
            "federation.clients=20",
            "algorithm={name='safe-dshb'}",
            "privacy={threat='ldp', epsilon=2.0, delta=1e-4}",
        ),
    ),
    "MNIST features, a client protected: secldp, ε = 27.8, n = 100": (
        (5, 10, 20),
        (
            "data={name='mnist', scaling='standard', partition='homogeneous'}",
            *FEATURES,
            "federation.clients=100",
            "algorithm={name='cafcor', momentum=0.85, weight_decay=1e-4}",
            "privacy={threat='secldp', epsilon=27.8, delta=1e-4}",
            "run.rounds=30",
        ),
    ),
    "Fashion-MNIST features, a client protected: secldp, ε = 39.6, n = 100": (
        (5, 10, 20),
        (
            "data={name='fashion-mnist', scaling='unit', partition='homogeneous'}",
            *FEATURES,
            "federation.clients=100",
            "algorithm={name='cafcor', momentum=0.9, batch_size=100, weight_decay=1e-4}",
            "privacy={threat='secldp', epsilon=39.6, delta=1e-4}",
            "run.rounds=30",
        ),
    ),
}
"""Tables: how many lie, and what is trained."""


def places(seeds: str) -> list[Place]:
    """Return every clip against every number of liars and every way to lie."""
    grid = []
    for table, (liars, said) in GROUNDS.items():
        base = parse({}, [*said, "aggregation={rule='caf'}", f"run.seeds='{seeds}'"])
        for row, clip in CLIPS.items():
            for column, config in _columns(base.with_(*clip), liars):
                grid.append(Place(table, row, column, config))
    return grid


def _columns(config: Config, liars: tuple[int, ...]) -> list[tuple[str, Config]]:
    """Return who lies, and the runs."""
    found = [("nobody lies", config.with_(f"federation.tolerate={max(liars)}"))]
    for f in liars:
        for told, attack in (
            ("against the gradient", "{name='bounded', direction='gradient'}"),
            ("up the loss", "{name='bounded', direction='loss'}"),
        ):
            changed = config.with_(f"federation.byzantine={f}", f"attack={attack}")
            found.append((f"f = {f}, {told}", changed))
    most = config.with_(f"federation.byzantine={max(liars)}", "attack={name='ring'}")
    return [*found, (f"f = {max(liars)}, ring", most)]


studies.register("short-clip", "How short a clip should be against liars bound by proofs, and ring")(
    Study(
        paper="short-clip",
        figures="no paper's: docs/short-clip.md",
        places=places,
        left_out="seeds 2 and 3; features; C = 0.5; the fewer liars",
        kept=lambda place: (
            "phishing" in place.table and place.row != "C = 0.5" and "f = 2" not in place.column
        ),
    )
)
