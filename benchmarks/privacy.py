"""What privacy costs in time: noise beside plain Gaussians, and accounting.

    python benchmarks/privacy.py [--clients 100] [--dim 431080] [--repeats 5] [--device cpu] [--json]

One core, processor time. Each line gives the best of several timings, the limit it is held against, and
whether it keeps it. Accounting is timed on settings that differ every time, so that nothing comes from a
cache; the import of dp-accounting is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from tables import table
from trilemma.base.keys import Key
from trilemma.privacy import (
    Mechanism,
    NoiseLaw,
    Release,
    Sampling,
    SecretNoise,
    SimulatedNoise,
    Threat,
    calibrate,
)
from trilemma.privacy.accounting.calibration import required_multiplier
from trilemma.privacy.accounting.spending import composed_epsilon
from trilemma.privacy.noise.grid import Grid
from turns import take_turns

LAW = NoiseLaw(sigma_ind=0.1, sigma_cor=0.6)


@dataclass(frozen=True)
class PrivacyRow:
    """One line of the table; `limit` is in the unit of `value`."""

    what: str
    value: float
    unit: str
    limit: float

    @property
    def kept(self) -> bool:
        """Whether the limit is kept."""
        return self.value <= self.limit


def best(repeats: int, device: str = "cpu", **actions: Callable[[], object]) -> list[float]:
    """Return the shortest time of each action, in turns: processor time, save on a GPU."""
    times = take_turns(actions, repeats, device).values()
    return [took.busy if device == "cpu" else took.seconds for took in times]


def noise_rows(clients: int, dim: int, repeats: int, device: str) -> Iterator[PrivacyRow]:
    """Simulated noise of all clients beside n × d Gaussians, and one real client's pairwise noise."""
    place, ids, rounds = torch.device(device), tuple(range(clients)), itertools.count()
    source = SimulatedNoise(Key(1), clients)
    generator = Key(2).torch(place)
    plain, simulated = best(
        repeats,
        device,
        plain=lambda: torch.randn(clients, dim, generator=generator, device=place),
        simulated=lambda: source.draw(LAW, ids, dim, next(rounds), place),
    )
    yield PrivacyRow(
        f"simulated noise, all {clients} clients, over n × d Gaussians", simulated / plain, "×", 1.3
    )
    grid = Grid.of(Release(2.25, LAW), dim, clients)
    vectors = torch.randn(clients, dim, generator=generator, device=place)

    def whole() -> None:
        noise = source.steps(LAW, grid.step, ids, dim, next(rounds), place)
        grid.numbers(grid.message(grid.contribution(vectors), noise))

    floating, gridded = best(
        repeats,
        device,
        floating=lambda: vectors + source.draw(LAW, ids, dim, next(rounds), place),
        gridded=whole,
    )
    yield PrivacyRow(
        f"simulated messages of {clients} clients: grid over float", gridded / floating, "×", 1.5
    )
    pairs = {j: j.to_bytes(32, "big") for j in range(1, clients)}
    node = SecretNoise(0, pairs)
    (seconds,) = best(repeats, one=lambda: node.draw(LAW, (0,), dim, next(rounds), place))
    yield PrivacyRow(f"one client's pairwise noise, {clients - 1} partners, d = {dim}", seconds, "s", 2.5)
    tracemalloc.start()
    node.draw(LAW, (0,), dim, next(rounds), place)
    peak = tracemalloc.get_traced_memory()[1] / (8 * dim)
    tracemalloc.stop()
    yield PrivacyRow("its memory, in vectors of d doubles", peak, "d", 8.0)


def accounting_rows(repeats: int) -> Iterator[PrivacyRow]:
    """Accounting and calibrating one setting, cold."""
    fresh = (1.0 + 1e-6 * k for k in itertools.count())
    threat = Threat("secldp", 100, 10)
    settings = [("unsampled", Mechanism(1.0), "exact", 30), ("unsampled", Mechanism(1.0), "rdp", 30)]
    for scheme, adjacency in (
        ("poisson", "published"),
        ("poisson", "add-remove"),
        ("poisson", "replace"),
        ("without-replacement", "replace"),
    ):
        like = Mechanism(1.0, Sampling(scheme, 100 / 6000), adjacency)
        settings += [(f"{scheme}, {adjacency}", like, name, 400) for name in ("rdp", "pld")]
    for label, like, name, rounds in settings:
        limit = 2.0 if name == "pld" else 0.2

        def account(like=like, name=name, rounds=rounds) -> None:
            mechanism = Mechanism(0.7 * next(fresh), like.sampling, like.adjacency)
            composed_epsilon(((mechanism, rounds),), 1e-4, name)

        def calibrated(like=like, name=name, rounds=rounds) -> None:
            required_multiplier(5.0 * next(fresh), 1e-4, rounds, like, name)

        spent, found = best(repeats, account=account, calibrated=calibrated)
        yield PrivacyRow(f"{name}, {label}: account", spent, "s", limit)
        yield PrivacyRow(f"{name}, {label}: calibrate", found, "s", limit)
    (found,) = best(repeats, found=lambda: calibrate(26.4 * next(fresh), 1e-4, 30, 2.25, threat))
    yield PrivacyRow("σ_ind and σ_cor for SecLDP, exact", found, "s", 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--dim", type=int, default=431_080)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        *noise_rows(chosen.clients, chosen.dim, chosen.repeats, chosen.device),
        *accounting_rows(chosen.repeats),
    ]
    if chosen.json:
        print(json.dumps([asdict(row) | {"kept": row.kept} for row in rows]))
        return
    lines = table(
        (
            ("what", row.what),
            ("measured", f"{row.value:.3g} {row.unit}"),
            ("limit", f"{row.limit:g} {row.unit}"),
            ("kept", "yes" if row.kept else "NO"),
        )
        for row in rows
    )
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
