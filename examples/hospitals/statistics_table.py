"""Print how far private statistics are from the exact ones: the tables of docs/statistics.md.

python examples/hospitals/statistics_table.py [--seeds 20] [--banks FOLDER]

FOLDER holds train.csv of BANKING77 (see examples/banks/README.md).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import trilemma as tl

HERE = Path(__file__).parent
HOSPITALS = {
    "age": {"low": 20, "high": 90, "bins": 14},
    "sex": {"values": [0, 1]},
    "trestbps": {"low": 80, "high": 200, "bins": 12},
    "disease": {"values": [0, 1, 2, 3, 4]},
}
Read = Callable[[tl.report.StatisticsResult], Any]


def table(task: tl.Task | Path, columns: Mapping[str, Any], read: Mapping[str, Read], **setting: Any) -> None:
    """Print the root of the mean squared error of each figure, and how often its interval has the truth."""
    exact = tl.statistics(task, columns, most=setting["most"], least=0)
    truth = {name: one(exact).value for name, one in read.items()}
    seeds, delta = setting.pop("seeds"), setting.pop("delta")
    said = [f"{name} ({truth[name]:.4g})" for name in read]
    print(f"| ε | who is trusted, how many may lie | {' | '.join(said)} |")
    print("|---|---|" + "---:|" * len(read))
    for threat, rule, liars in (("ldp", "mean", 0), ("secldp", "mean", 0), ("ldp", "cwtm", 1)):
        for epsilon in (0.5, 1.0, 2.0):
            privacy = {"threat": threat, "epsilon": epsilon, "delta": delta}
            runs = [
                tl.statistics(
                    task, columns, privacy=privacy, rule=rule, tolerate=liars, seed=seed, least=0, **setting
                )
                for seed in range(1, seeds + 1)
            ]
            cells = []
            for name, one in read.items():
                found = [figure for run in runs if (figure := one(run)) is not None]
                off = [figure.value - truth[name] for figure in found if figure.value is not None]
                held = [(figure.low or 0) <= truth[name] <= (figure.high or np.inf) for figure in found]
                cells.append(f"± {np.sqrt(np.mean(np.square(off))):.2g}, {np.mean(held):.0%}")
            print(f"| {epsilon:g} | {threat}, {liars} | {' | '.join(cells)} |", flush=True)


def banks(folder: Path) -> tl.Task:
    """Return queries at twenty banks, with their length."""
    with (folder / "train.csv").open(newline="") as file:
        rows = [{"length": len(row["text"])} for row in csv.DictReader(file)]
    order = np.random.default_rng(1).permutation(len(rows))
    return tl.Task(
        model=lambda: nn.Linear(1, 1),
        clients=lambda client, records: (np.zeros((1, 1)), np.zeros(1)),
        records=lambda client: [rows[row] for row in order[client::20]],
        count=20,
        target="values",
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="private statistics beside exact ones")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--banks", type=Path)
    options = parser.parse_args()
    about: dict[str, Read] = {
        "mean age": lambda found: found.column("age").mean,
        "variance of age": lambda found: found.column("age").variance,
        "median age": lambda found: found.column("age").quantiles[3].figure,
        "without disease": lambda found: found.column("disease").cells[1].count,
        "blood pressure missing": lambda found: found.column("trestbps").missing,
    }
    table(HERE / "task.py", HOSPITALS, about, most=400, delta=1e-3, seeds=options.seeds)
    if options.banks is not None:
        columns = {"length": {"low": 0, "high": 200, "bins": 20}}
        print()
        queries: dict[str, Read] = {
            "mean length": lambda found: found.column("length").mean,
            "median length": lambda found: found.column("length").quantiles[3].figure,
            "queries": lambda found: found.records,
        }
        table(banks(options.banks), columns, queries, most=600, delta=1e-4, seeds=options.seeds)


if __name__ == "__main__":
    main()
