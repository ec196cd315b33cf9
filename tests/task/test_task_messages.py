"""What a newcomer gets wrong in Python is said in words: whose row, which argument, what name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import trilemma as tl
from trilemma.api import configured
from trilemma.base.errors import ConfigError, hint
from trilemma.task.file import TaskFile


def examples(label: int = 1, rows: int = 30) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    y = np.arange(rows) % 2
    y[5] = label
    return x, y


def task(**more: Any) -> tl.Task:
    return tl.Task(
        **{"model": lambda: nn.Linear(3, 2), "clients": {"north": examples(), "south": examples()}, **more}
    )


@pytest.mark.parametrize("width", [2, 5])
def test_a_label_without_an_output_is_told_by_client_and_row(width: int) -> None:
    wrong = task(model=lambda: nn.Linear(3, width), clients={"north": examples(), "south": examples(label=7)})
    with pytest.raises(tl.UserError, match=rf", {width}\) for 8 classes .client 'south', row 5: label 7"):
        wrong.learner(wrong.dataset)


def test_a_label_beyond_the_classes_is_told_by_client_and_row() -> None:
    with pytest.raises(tl.UserError, match="client 'south', row 5: label 7; allowed: 0 to 1"):
        task(
            model=lambda: nn.Linear(3, 16), classes=2,
            clients={"north": examples(), "south": examples(label=7)},
        )  # fmt: skip


def test_whole_numbers_that_may_be_values_are_pointed_out() -> None:
    ages = (examples()[0], np.arange(30) * 5)
    with pytest.raises(tl.UserError, match='numbers to predict and no classes, say target = "values"'):
        task(model=lambda: nn.Linear(3, 1), clients=[ages]).learner(task(clients=[ages]).dataset)


@pytest.mark.parametrize(
    ("name", "allowed", "meant"),
    [
        ("trimmed_mean", ["cwtm", "mean"], "cwtm"),
        ("FedMedian", ["cwmed", "mean"], "cwmed"),
        ("multi_krum", ["multikrum", "krum"], "multikrum"),
        ("learning_rate", ["lr", "momentum"], "lr"),
        ("ALIE", ["alie", "foe"], "alie"),
        ("fedavg", ["caf", "mean"], "caf"),
    ],
)
def test_other_libraries_names_lead_here(name: str, allowed: list[str], meant: str) -> None:
    assert hint(name, allowed) == f"did you mean {meant!r}? "


@pytest.mark.parametrize("name", ["learned_mean", "fed_mean", "a_mean", "tmean"])
def test_no_name_leads_to_a_rule_that_defends_nobody(name: str) -> None:
    assert "mean" not in hint(name, ["mean", "cwtm"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "trimmed_mean"}, "did you mean 'cwtm'"),
        ({"learning_rate": 0.1}, "option of the algorithm, as in algorithm={'name': '[a-z0-9-]*', 'lr': …}"),
        ({"algorithm": {"name": "cafcor", "learning_rate": 0.1}}, "did you mean 'lr'"),
        ({"byzantine": 1, "attack": "ALIE"}, "did you mean 'alie'"),
        ({"attack": "alie"}, "nobody plays it: byzantine = 0"),
        ({"rounds": 0}, "^rounds = 0"),
        ({"out": Path(__file__).parent}, "another out"),
        ({"algorithm": {"name": "dsgd", "lr": -1}}, "^algorithm: lr = -1"),
    ],
)
def test_what_is_wrong_is_said_of_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(tl.UserError, match=message) as told:
        tl.run(task(), **{"rounds": 1, **arguments})
    assert not any(word in str(told.value) for word in ("[run]", "[attack]", "[algorithm]", "--"))


def test_a_class_that_needs_arguments_is_one_sentence() -> None:
    with pytest.raises(tl.UserError, match=r"^model is the class Linear, which needs arguments: [^\n]*$"):
        task(model=nn.Linear)

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)

    assert task(model=Net).learner(None).model.dim == 8


def test_an_error_of_syntax_shows_its_line(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("clients = 3\n\ndef model(:\n    return None\n")
    with pytest.raises(tl.UserError) as told:
        TaskFile(tmp_path / "task.py")
    head, line, mark = str(told.value).splitlines()
    assert head.endswith("task.py, line 3: invalid syntax")
    assert (line, mark) == ("    def model(:", "              ^")


def test_the_usual_delta_is_told_where_nothing_is_said() -> None:
    unsaid = configured(privacy=tl.Privacy(threat="ldp", epsilon=4))
    assert any("delta = 1e-05, as nothing is said" in note for note in unsaid.notes)
    assert not configured(privacy=tl.Privacy(threat="ldp", epsilon=4, delta=1e-5)).notes


def test_errors_are_importable() -> None:
    assert issubclass(ConfigError, tl.UserError)
