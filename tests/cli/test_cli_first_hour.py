"""What a newcomer meets in the first hour: tables that open again, mistakes that are told before any work."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import trilemma as tl
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.records import Spread, Summary
from trilemma.cli import app
from trilemma.federation.party import provisioning
from trilemma.report.tables import results_table, tightest_epsilon

TINY = {"rounds": 1, "clients": 3, "algorithm": {"name": "dsgd", "batch_size": 5}}


def call(*arguments: object) -> str:
    outcome = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if outcome.exception is not None:
        raise outcome.exception
    return outcome.output


def summary(**more: Any) -> Summary:
    spread = Spread.of({1: 0.951, 2: 0.972, 3: 0.963})
    scores = {"accuracy": spread, "auc": spread}
    plain = Summary(scores, spread, {}, 1e-4, 1.0, "dsgd", "caf", 4, 1, "foe", "ldp", 9)
    return replace(plain, **more)


def test_the_table_of_a_run_opens_again(tmp_path: Path) -> None:
    tl.run(out=tmp_path / "run", **TINY)
    assert "| dsgd | mean | 0 of 3 | none |" in call("table", tmp_path / "run")
    with pytest.raises(UserError, match="say with --rows by which key"):
        call("table", tmp_path)


def test_a_folder_that_is_taken_is_told_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr("trilemma.simulate.run", never)
    with pytest.raises(UserError, match="already holds something"):
        call("run", "--out", tmp_path)
    monkeypatch.setattr("trilemma.cli.federation.settings_of", never)
    with pytest.raises(UserError, match="is not empty"):
        call("federation", "init", tmp_path, "--clients", 3)
    provisioning.check_free(tmp_path / "free")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"privacy": {"epsilon": 8.0}}, "give threat = cdp, secldp, byzldp, ldp; to train without privacy"),
        ({"federation": {"clients": 3}}, "federation is no argument: pass its keys themselves"),
        ({"privacy": {"epsilon": -1.0, "threat": "ldp"}}, "epsilon = -1.0: allowed: more than 0"),
        ({"byzantine": 3, "clients": 5}, "set tolerate to what the rule should expect"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_what_is_allowed(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tl.run(**arguments)


def test_features_that_a_model_does_not_take_are_named(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 12)).astype(np.float32)
    task = tl.Task(model=lambda: nn.Linear(12, 2), clients=[(x, np.arange(30) % 2)])
    with pytest.raises(UserError, match=r"examples \(30, 8\), projected to 8 \(\[data\]\)"):
        tl.run(task, data={"project": 8}, rounds=1, out=tmp_path / "run")


def test_one_line_says_one_epsilon() -> None:
    private = summary(epsilon={"pld": 8.0, "rdp": 18.5, "c1": 20.2}, accountant="pld")
    said = tightest_epsilon(private)[1]
    assert said == "ε = 8 under ldp at δ = 0.0001 (pld; looser methods give 18.5 and 20.2)"


def test_headings_can_be_read_on_a_narrow_screen() -> None:
    table = results_table([("safe-dshb", summary())], summary(byzantine=0), "own")
    console = Console(file=io.StringIO(), width=80, color_system=None)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get()
    for heading in ("run", "rule", "liars", "attack", "ε", "accuracy", "auc", "safe-dshb", "0.01"):
        assert heading in lines
    assert "…" not in lines
    assert max(map(len, lines.splitlines())) <= 80


def test_a_run_without_liars_is_compared_with_none() -> None:
    assert "no liars" not in str(results_table([("sgd", summary(byzantine=0))], None, "own"))
