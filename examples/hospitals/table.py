"""Print the README's table: the hospitals with and without a liar, with and without privacy.

python examples/hospitals/table.py [--seeds 5] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import trilemma as tl
from trilemma.base.records import Spread

TASK = Path(__file__).with_name("task.py")
LEARNING = {"name": "safe-dshb", "unit": "example", "lr": 0.5, "momentum": 0.9, "batch_size": 30}
ATTACKS = ("foe", "alie", "sf")
RULES = ("mean", "smea", "geomed")


def accuracy(out: Path, epsilon: float | None, seeds: int, **setting: object) -> Spread:
    """Train, and return accuracy on the test patients of all hospitals."""
    budget = {} if epsilon is None else {"threat": "ldp", "clip": 1.0, "epsilon": epsilon, "delta": 1e-3}
    result = tl.run(TASK, algorithm=LEARNING, privacy=budget, rounds=20, seeds=seeds, out=out, **setting)
    return result.summary.metrics["accuracy"]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description="the table of examples/hospitals/README.md")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="where to keep the runs")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp())
    print("| ε of one record | nobody lies | " + " | ".join(f"one lies: {rule}" for rule in RULES) + " |")
    print("|---" * (2 + len(RULES)) + "|")
    for epsilon in (None, 8.0, 4.0, 1.0):
        name = "no privacy" if epsilon is None else f"{epsilon:g}"
        cells = [accuracy(folder / f"{name}-honest", epsilon, options.seeds)]
        for rule in RULES:
            found = [
                accuracy(
                    folder / f"{name}-{rule}-{attack}",
                    epsilon,
                    options.seeds,
                    rule=rule,
                    attack=attack,
                    byzantine=1,
                )
                for attack in ATTACKS
            ]
            cells.append(min(found, key=lambda spread: spread.mean or 0.0))
        print(
            f"| {name} | " + " | ".join(f"{one.mean:.3f} ± {one.std:.3f}" for one in cells) + " |", flush=True
        )


if __name__ == "__main__":
    main()
