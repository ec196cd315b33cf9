"""Heart disease at four hospitals: real records, logistic regression; one file, simulated and deployed.

    trilemma check examples/hospitals/task.py
    trilemma run examples/hospitals/run.toml --task examples/hospitals/task.py
    trilemma federation init pilot --task examples/hospitals/task.py --config examples/hospitals/run.toml

The records are the processed files of the UCI Heart Disease data set (Janosi, Steinbrunn, Pfisterer,
Detrano 1988, CC BY 4.0), prepared as FLamby does (NeurIPS 2022): `slope`, `ca` and `thal` are dropped,
then rows with a missing value; `cp` and `restecg` are one-hot; two thirds of each hospital's patients are
for training. Other than there, features are scaled by constants that everybody may know: a hospital's own
mean and deviation would leave the hospital inside the model.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
from torch import nn

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FOLDER = Path(os.environ.get("HEART", Path(__file__).parent / "data"))
"""Where the records are; a hospital has its own file only."""
COLUMNS = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"]
# What textbooks say of adults: centre and spread of each measured column.
SCALES = {"age": (55, 10), "trestbps": (130, 20), "chol": (220, 60), "thalach": (140, 25), "oldpeak": (1, 1)}

clients = len(HOSPITALS)
loss = nn.BCEWithLogitsLoss()
metrics = ("accuracy", "auc")


def model() -> nn.Module:
    """Return a logistic regression on 13 features, starting from zero."""
    net = nn.Linear(13, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def data(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a hospital's training records: features (m, 13), and 1.0 where there is disease (m, 1)."""
    return _split(client)[0]


def test() -> tuple[np.ndarray, np.ndarray]:
    """Return the test records of all hospitals together."""
    parts = [_split(client)[1] for client in range(len(HOSPITALS))]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _records(client: int) -> tuple[np.ndarray, np.ndarray]:
    with (FOLDER / f"{HOSPITALS[client]}.csv").open() as file:
        rows = [row for row in csv.reader(file) if "?" not in row[: len(COLUMNS)]]
    table = {name: np.array([float(row[i]) for row in rows]) for i, name in enumerate(COLUMNS)}
    disease = np.array([float(row[13]) > 0 for row in rows])
    features = [
        (table[name] - SCALES[name][0]) / SCALES[name][1] if name in SCALES else table[name]
        for name in COLUMNS
        if name not in ("cp", "restecg")
    ]
    features += [table["cp"] == kind for kind in (2, 3, 4)] + [table["restecg"] == kind for kind in (1, 2)]
    return np.stack(features, axis=1).astype(np.float32), disease.astype(np.float32)[:, None]


def _split(client: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Divide a hospital's records two to one, the sick and the healthy alike."""
    x, y = _records(client)
    order = np.random.default_rng(43).permutation(len(y))
    ranks = np.empty(len(y))
    for label in (0.0, 1.0):
        members = order[y[order, 0] == label]
        ranks[members] = (np.arange(len(members)) + 0.5) / len(members)
    ordered = np.argsort(ranks, kind="stable")
    train = np.sort(ordered[: int(len(y) * 0.66)])
    rest = np.sort(ordered[int(len(y) * 0.66) :])
    return (x[train], y[train]), (x[rest], y[rest])
