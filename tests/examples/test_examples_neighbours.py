"""One changed record changes one training example: of the examples, and of what the tutorials build."""

from __future__ import annotations

import csv
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_examples import EXAMPLES, module


def training(task, client: int) -> Counter[bytes]:
    """Return a client's training examples, each as the bytes of its features and label."""
    x, y = (np.asarray(part) for part in task.data(client, task.records(client)))
    return Counter(x[i].tobytes() + y[i].tobytes() for i in range(len(y)))


@pytest.mark.parametrize("column", [13, 4, 0])
def test_one_changed_patient_changes_one_training_example_of_its_hospital(
    column: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label, a value that is missing now, and a value: no other patient changes sides for it."""
    here = EXAMPLES / "hospitals" / "data"
    for path in here.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("HEART", str(tmp_path))
    task = module(EXAMPLES / "hospitals" / "task.py")
    draw = random.Random(1)
    for client, name in enumerate(task.HOSPITALS):
        rows = list(csv.reader((here / f"{name}.csv").open()))
        before = training(task, client)
        for place in draw.sample(range(len(rows)), 10):
            other = [*rows[place]]
            other[column] = {13: "0" if float(other[13]) else "1", 4: "?", 0: "44.5"}[column]
            changed = [*rows[:place], other, *rows[place + 1 :]]
            (tmp_path / f"{name}.csv").write_text("\n".join(map(",".join, changed)) + "\n")
            after = training(task, client)
            assert max((before - after).total(), (after - before).total()) <= 1, (name, place)
