"""Aggregation rules: time relative to the plain mean, error against float64, and ByzFL beside both.

    python benchmarks/aggregation.py                                   # n = 30, f = 3, d = 2.5e6 and 1e7
    pip install --no-deps --target peer byzfl==0.0.11                  # for the benchmark only
    python benchmarks/aggregation.py --peer-path peer
    python benchmarks/aggregation.py --streams 30x1e8,100x1e7,500x1e6 --rules caf,cwmed
    python benchmarks/aggregation.py --device cuda --clients 100 --byzantine 10 --dims 1e7

The same as `trilemma bench aggregation`, for machines with torch and numpy only (add src to PYTHONPATH).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from trilemma.aggregation.benchmark_report import Plan, report
from trilemma.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Plan):
        kind = Path if field.default is None else type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    try:
        for line in report(Plan(**vars(parser.parse_args()))):
            print(line, flush=True)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
