"""Survival of breast-cancer patients in six regions: Cox's partial likelihood and the concordance index.

    export BRCA=FOLDER                     # with brca.csv and train_test_split.csv, from FLamby's repository
    trilemma check examples/survival/task.py
    trilemma run examples/survival/run.toml --task examples/survival/task.py

Any loss and any metric will do, and this is the proof: the loss couples the patients of a batch (each is
compared with those who lived longer), so no patient has a gradient of their own. It can be clipped per
client, never per example; asked for that, the program says so. The data are not part of the package:
their terms of use are those of the GDC's open-access data.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from trilemma import Declaration, Values

clients = 6
expects = Declaration(Values("numbers", (39,)), Values("numbers", (2,), low=0))


def model() -> nn.Module:
    """Return a linear log-risk of 39 features, starting from zero."""
    net = nn.Linear(39, 1, bias=False)
    nn.init.zeros_(net.weight)
    return net


def loss(risk: Tensor, patients: Tensor) -> Tensor:
    """Return Cox's negative log partial likelihood, a mean over observed deaths (Breslow's ties).

    `patients` (b, 2) are event (1: died, 0: left the study alive) and days.
    """
    event, days = patients[:, 0], patients[:, 1]
    at_risk = days[None, :] >= days[:, None]
    total = torch.where(at_risk, risk.squeeze(1)[None, :], -torch.inf).logsumexp(1)
    return (event * (total - risk.squeeze(1))).sum() / event.sum().clamp(min=1.0)


def concordance(risk: Tensor, patients: Tensor) -> float:
    """Return Harrell's index: of all pairs whose order is known, the share that risk puts in that order."""
    event, days, risk = patients[:, 0], patients[:, 1], risk.squeeze(1)
    known = (days[:, None] < days[None, :]) & (event[:, None] > 0)
    right = (risk[:, None] > risk[None, :]).double() + 0.5 * (risk[:, None] == risk[None, :]).double()
    return float(right[known].mean())


metrics = {"concordance": concordance}


def data(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a region's training patients: features (m, 39), event and days (m, 2)."""
    return _patients(f"train_{client}")


def test() -> tuple[np.ndarray, np.ndarray]:
    """Return the test patients of all regions together."""
    parts = [_patients(f"test_{client}") for client in range(clients)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _patients(fold: str) -> tuple[np.ndarray, np.ndarray]:
    folder = Path(os.environ.get("BRCA", "."))
    with (folder / "train_test_split.csv").open() as file:
        chosen = [row["pid"] for row in csv.DictReader(file) if row["fold2"] == fold]
    with (folder / "brca.csv").open() as file:
        records = {row["pid"]: row for row in csv.DictReader(file)}
    names = [name for name in next(iter(records.values())) if name not in ("pid", "E", "T")]
    x = np.array([[float(records[pid][name]) for name in names] for pid in chosen], dtype=np.float32)
    x[:, names.index("age_at_index")] = (x[:, names.index("age_at_index")] - 60) / 15
    y = np.array([[float(records[pid]["E"]), float(records[pid]["T"])] for pid in chosen], dtype=np.float32)
    return x, y
