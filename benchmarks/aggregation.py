"""Aggregation rules: time relative to the plain mean, error against float64, and ByzFL beside both.

    python benchmarks/aggregation.py                                   # n = 30, f = 3, d = 2.5e6 and 1e7
    pip install --no-deps --target peer byzfl==0.0.11                  # for the benchmark only
    python benchmarks/aggregation.py --peer-path peer
    python benchmarks/aggregation.py --streams 30x1e8,100x1e7,500x1e6 --rules caf,cwmed
    python benchmarks/aggregation.py --device cuda -n 100 -f 10 -d 1e7 --rules mean,caf,cwmed,cwtm,nnm+cwmed

The same as `trilemma bench aggregation`.
"""

from __future__ import annotations

import sys

from trilemma.cli.bench import bench_app
from trilemma.errors import UserError

if __name__ == "__main__":
    try:
        bench_app(["aggregation", *sys.argv[1:]])
    except UserError as error:
        sys.exit(f"error: {error}")
