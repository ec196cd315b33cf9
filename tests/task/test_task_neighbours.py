"""`trilemma check --neighbours`: how many examples change where one record does."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma.base.errors import UserError
from trilemma.cli import app
from trilemma.task import Task
from trilemma.task.neighbours import changes, told

GOOD = """
import numpy as np
from torch import nn
import trilemma as tl

clients = 2
classes = 2
examples = 20

def model():
    return nn.Linear(2, 2)

def records(client):
    draw = np.random.default_rng(client)
    found = [{"age": f"{draw.normal(50, 10):.1f}", "chol": f"{draw.normal(220, 30):.1f}", "ill": str(k % 2)}
             for k in range(40)]
    found[3]["chol"] = "?"
    return found

def data(client, records):
    kept = [one for one in records if tl.split(one, test=0.3) == "train"]
    rows = [tl.fill(one, {"age": 50.0, "chol": 220.0, "ill": 0}) for one in kept]
    x = np.array([[(one["age"] - 50) / 10, (one["chol"] - 220) / 30] for one in rows])
    return x.astype(np.float32), np.array([one["ill"] for one in rows])
"""
ALL = 'kept = [one for one in records if tl.split(one, test=0.3) == "train"]'
BAD = {
    "scaled by its own mean": (
        "    return x.astype", "    x = x - x.mean(0)\n    return x.astype",
    ),
    "cut off after a sort": (ALL, 'kept = sorted(records, key=lambda one: one["ill"] + one["age"])[:28]\n'
                             '    kept = [{**one, "age": str(place)} for place, one in enumerate(kept)]'),
    "ranked by labels": (ALL, 'order = np.argsort([one["ill"] for one in records], kind="stable")\n'
                         "    kept = [records[i] for i in order[::3]]"),
    "filled with a mean": ('"chol": 220.0', '"chol": float(np.mean([float(one["chol"]) '
                           'for one in records if one["chol"] != "?"]))'),
}  # fmt: skip


def task(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "task.py"
    path.write_text(text)
    return path


def checked(path: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit code and all that was said."""
    found = CliRunner().invoke(app, ["check", str(path), "--device", "cpu", *arguments])
    return found.exit_code, found.output + str(found.exception or "")


def test_a_task_that_looks_at_one_record_at_a_time_passes(tmp_path: Path) -> None:
    code, said = checked(task(tmp_path, GOOD), "--neighbours")
    assert code == 0
    assert "at most 1 training examples change" in said
    assert "every client counts as holding 20 examples" in said


@pytest.mark.parametrize("mistake", BAD)
def test_a_task_in_which_a_record_moves_others_is_refused_in_words(tmp_path: Path, mistake: str) -> None:
    path = task(tmp_path, GOOD.replace(*BAD[mistake]))
    assert checked(path)[0] == 0  # nothing of it shows without neighbours
    code, said = checked(path, "--neighbours")
    assert code != 0
    assert "training examples change. An ε for one example is then worth" in said
    worst = max(one.examples for one in changes(Task.from_file(path)))
    assert worst > 1


def test_a_count_that_a_record_decides_has_to_be_said(tmp_path: Path) -> None:
    path = task(tmp_path, GOOD.replace("examples = 20\n", ""))
    code, said = checked(path, "--neighbours")
    assert code != 0
    assert "Say a public number in the task: examples" in said


def test_a_record_that_is_refused_is_told(tmp_path: Path) -> None:
    strict = "    assert records[0]['ill'] == '0'\n    return x.astype"
    path = task(tmp_path, GOOD.replace("    return x.astype", strict))
    code, said = checked(path, "--neighbours")
    assert code != 0
    assert "record ends a simulation" in said
    assert "{'age'" not in said  # no record is in a message


def test_a_task_that_names_no_records_is_told_how(tmp_path: Path) -> None:
    text = GOOD.replace("def records(client)", "def lines(client)").replace(
        "def data(client, records):", "def data(client):\n    records = lines(client)"
    )
    code, said = checked(task(tmp_path, text), "--neighbours")
    assert code != 0
    assert "define records(client)" in said
    with pytest.raises(UserError, match="define records"):
        changes(Task.from_file(task(tmp_path, text)))


def test_records_may_be_rows_or_arrays_and_come_from_python() -> None:
    import numpy as np
    from torch import nn

    table = np.arange(60.0).reshape(20, 3)

    def centred(client, records):  # type: ignore[no-untyped-def]
        x = np.asarray(records)[:, :2]
        return (x - x.mean(0)).astype(np.float32), np.arange(len(records)) % 2

    own = Task(lambda: nn.Linear(2, 2), centred, records=lambda client: table, count=1)
    assert own.dataset.x_train.shape == (20, 2)
    seen, problems = told(changes(own, pairs=8), None)
    assert "at most 20 training examples" in seen[0]
    assert len(problems) == 1
    with pytest.raises(UserError, match="records go with clients that is a function"):
        Task(lambda: nn.Linear(2, 2), [(table, table[:, 0])], records=lambda client: table)
    with pytest.raises(UserError, match="examples = 0"):
        Task(lambda: nn.Linear(2, 2), centred, records=lambda client: table, count=1, examples=0)
