"""What the search of `adaptive` liars adds to a round of CafCor on MNIST, beside the rest of that round.

    PYTHONPATH=benchmarks python lab/benchmarks/search_cost.py [--turns 3] [--rounds 15] [--device cuda]

A case is a rule, what liars do with their noise, and a direction. Times are medians over rounds, the first
few left out, and over turns.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from tables import table
from trilemma.experiment import load
from trilemma.simulate import engine
from trilemma.simulate.experiment import assemble

CASES = [
    f"{rule} {noise} gradient"
    for rule in ("evidence+mean", "evidence+caf", "caf")
    for noise in ("protocol", "rotated")
] + ["evidence+mean protocol loss", "evidence+mean protocol errors"]

WARM = 4
"""Rounds that do not count: in them kernels are compiled and recorded."""


def measured(case: str, rounds: int, device: str | None) -> tuple[float, float]:
    """Return the milliseconds of a round of a case: of the attack, and of all the rest."""
    rule, noise, direction = case.split()
    asked = [f"aggregation.rule={rule}", "federation.byzantine=10", f"run.rounds={max(rounds, 30)}"]
    attack = f"attack={{name='adaptive', noise='{noise}', direction='{direction}'}}"
    settings = load("cafcor-mnist", [*asked, attack])
    experiment = assemble(settings, 1, device=None if device is None else torch.device(device))
    progress, taken = engine.start(experiment), []
    for _ in range(rounds):
        progress, record = engine.step(experiment, progress)
        taken.append((record.seconds["attack"], sum(record.seconds.values())))
    attacks, whole = zip(*taken[WARM:], strict=True)
    searching = 1e3 * statistics.median(attacks)
    rest = 1e3 * statistics.median(all_ - attack for all_, attack in zip(whole, attacks, strict=True))
    return searching, rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device")
    chosen = parser.parse_args()
    rows = []
    for case in CASES:
        rounds = min(chosen.rounds, WARM + 4) if case.endswith("errors") else chosen.rounds
        turns = [measured(case, rounds, chosen.device) for _ in range(chosen.turns)]
        searching, rest = (statistics.median(one) for one in zip(*turns, strict=True))
        figures = {"rest, ms": rest, "adaptive, ms": searching, "rounds": searching / rest}
        rows.append((("case", case), *((name, f"{figure:.3g}") for name, figure in figures.items())))
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
