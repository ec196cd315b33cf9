"""Heart disease at four hospitals: real records, logistic regression; one file, simulated and deployed.

    trilemma check examples/hospitals/task.py --neighbours
    trilemma run examples/hospitals/run.toml --task examples/hospitals/task.py
    trilemma federation init pilot --task examples/hospitals/task.py --config examples/hospitals/run.toml

The records are the processed files of the UCI Heart Disease data set (Janosi, Steinbrunn, Pfisterer,
Detrano 1988, CC BY 4.0). As in FLamby (NeurIPS 2022), `slope`, `ca` and `thal` are dropped, `cp` and
`restecg` are one-hot, and two thirds of the patients are for training. Other than there, everything is
decided about a patient by that patient's record alone, so that one changed record changes one example: a
hash of the record says whether it is for training, what is missing is filled in, and features are scaled,
by constants that everybody may know.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
from torch import nn

import trilemma as tl

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
FOLDER = Path(os.environ.get("HEART", Path(__file__).parent / "data"))
"""Where the records are; a hospital has its own file only."""
# What textbooks say of adults who are examined: what stands in for a missing value, and what a measured
# column is centred at and divided by.
USUAL = {"age": 55.0, "sex": 1.0, "cp": 4.0, "trestbps": 130.0, "chol": 220.0, "fbs": 0.0, "restecg": 0.0,
         "thalach": 140.0, "exang": 0.0, "oldpeak": 1.0}  # fmt: skip
SPREAD = {"age": 10.0, "trestbps": 20.0, "chol": 60.0, "thalach": 25.0, "oldpeak": 1.0}
KINDS = {"cp": (2, 3, 4), "restecg": (1, 2)}
COLUMNS = (*USUAL, "slope", "ca", "thal", "disease")
"""What the files hold, in order; `disease` is 0 or a stage."""

Record = dict[str, str]

clients = len(HOSPITALS)
examples = 75
"""What every hospital counts as holding: the smallest has 123 patients, two thirds of them for training."""
loss = nn.BCEWithLogitsLoss()
metrics = ("accuracy", "auc")
expects = tl.Declaration(
    tl.Values("numbers", (13,), low=-10, high=10), tl.Values("numbers", (1,), low=0, high=1)
)
"""What an example may be; one that is otherwise counts as zero."""


def model() -> nn.Module:
    """Return a logistic regression on 13 features, starting from zero."""
    net = nn.Linear(13, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def records(client: int) -> list[Record]:
    """Return a hospital's patients as its file has them."""
    with (FOLDER / f"{HOSPITALS[client]}.csv").open() as file:
        return list(csv.DictReader(file, COLUMNS))


def data(client: int, records: list[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Return a hospital's training examples: features (m, 13), and 1.0 where there is disease (m, 1)."""
    return _examples(records, "train")


def test() -> tuple[np.ndarray, np.ndarray]:
    """Return the test examples of all hospitals together."""
    return _examples([record for client in range(clients) for record in records(client)], "test")


def _examples(records: list[Record], side: str) -> tuple[np.ndarray, np.ndarray]:
    chosen = [record for record in records if tl.split(record, test=1 / 3) == side]
    disease = [tl.fill(record, {"disease": 0.0})["disease"] > 0 for record in chosen]
    return np.array([_features(record) for record in chosen], np.float32), np.array(disease, np.float32)[
        :, None
    ]


def _features(record: Record) -> list[float]:
    filled = tl.fill(record, USUAL)
    measured = [(filled[name] - USUAL[name]) / by for name, by in SPREAD.items()]
    return [
        *measured,
        *(filled[name] for name in ("sex", "fbs", "exang")),
        *(float(filled[name] == kind) for name, kinds in KINDS.items() for kind in kinds),
    ]
