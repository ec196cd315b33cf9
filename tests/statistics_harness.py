"""What tests of statistics between parties share: records, and a federation that asks for them."""

from __future__ import annotations

from pathlib import Path

from federation_harness import INSTANT, share_seeds
from trilemma import config as configurations
from trilemma.federation.client.spending import write_budgets
from trilemma.federation.party import provisioning
from trilemma.federation.party.layout import Party
from trilemma.federation.party.public_facts import Federation
from trilemma.federation.party.task import load_task

TASK = """
import numpy as np
from torch import nn
import trilemma as tl

expects = tl.Declaration(tl.Values("numbers", (1,), low=-5, high=5), tl.Values("whole", high=1))
clients, examples = 5, 30

def model():
    return nn.Linear(1, 2)

def records(client):
    draw = np.random.default_rng(client)
    rows = [{"age": float(age), "ill": int(age > 55)} for age in draw.normal(50, 10, 40 + 5 * client)]
    return rows if client else [{"age": "?"}, {"ill": float("nan")}, *rows]

def data(client, records):
    good = [one for one in records if len(one) == 2]
    x = np.array([[(one["age"] - 50) / 10] for one in good], np.float32)
    return x, np.array([one["ill"] for one in good])
"""
STATISTICS = {
    "algorithm": {
        "name": "statistics",
        "batch_size": 100,
        "label": "ill",
        "columns": {"age": {"low": 20, "high": 80, "bins": 6}, "ill": {"values": [0, 1]}},
    },
    "federation": {"clients": 5, "tolerate": 1},
    "aggregation": {"rule": "cwtm"},
    "privacy": {"threat": "secldp", "epsilon": 4.0, "delta": 1e-3, "repeated": 0.0},
}
TRAINING = {
    "algorithm": {"name": "safe-dshb", "lr": 0.1, "momentum": 0.0, "batch_size": 30},
    "federation": {"clients": 5, "tolerate": 1},
    "aggregation": {"rule": "cwtm"},
    "privacy": {"threat": "secldp", "clip": 1.0, "epsilon": 2.0, "delta": 1e-3, "repeated": 0.0},
    "run": {"rounds": 2},
}


def settings(tables: dict) -> configurations.Config:
    return configurations.parse(tables, own=configurations.Own(5))


def made(folder: Path, budget: float = 6.0) -> list[Party]:
    """Make a federation that is configured for statistics, and budgets."""
    (folder / "task.py").write_text(TASK)
    facts = Federation("stats", 5, examples=30, timing=INSTANT, transcript=True)
    config = settings(STATISTICS).toml()
    found = provisioning.init(folder / "federation", facts, config, task=folder / "task.py")
    write_budgets(found[1:], load_task(found[0]), budget)
    share_seeds(found, config)
    return found
