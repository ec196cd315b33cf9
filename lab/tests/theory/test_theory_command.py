"""`trilemma theory`: what theorems promise, as a command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from trilemma.base.errors import UserError
from trilemma_lab import theory
from trilemma_lab.cli.theory import theory_command

SIZES = ("-n", "7", "-f", "2", "-d", "69", "--rounds", "400")
app = typer.Typer()
app.command("theory")(theory_command)


def test_bounds_of_every_rule(tmp_path: Path) -> None:
    np.save(tmp_path / "gradients.npy", np.diag([1.0, 2.0, 3.0, 4.0, 5.0]))
    few = ["-m", "2764", "-b", "25", "--convexity", "0.01", "--sigma-ind", "0.08", "--epsilon", "0.01"]
    said = [*SIZES, *few, "--gradients", str(tmp_path / "gradients.npy"), "--json"]
    found = json.loads(CliRunner().invoke(app, said).stdout)
    rows = {row["rule"]: row for row in found["rules"]}
    assert rows["caf"]["kappa"] == pytest.approx(6 * 2 / 5 * (1 + 2 / 3) ** 2)
    assert rows["caf"]["strongly_convex"]["vacuous"]
    assert rows["mean"]["kappa"] is None
    assert found["heterogeneity"]["g"] > found["heterogeneity"]["g_cov"] > 0
    assert found["lower_bound"]["total"] > 0


def test_tables() -> None:
    said = [*SIZES, "--rule", "caf", "--rule", "nnm+cwmed", "--epsilon", "1"]
    text = CliRunner(env={"COLUMNS": "160"}).invoke(app, said).stdout
    for part in ("vacuous", "nnm+cwmed", "needs --convexity", "proves nothing here"):
        assert part in text


def test_byz_clip21s_theorems() -> None:
    few = ["--rule", "caf", "--clip", "0.1", "--sigma-ind", "0.3", "--longest", "2", "--lr", "0.05"]
    record = json.loads(CliRunner().invoke(app, [*SIZES, *few, "--json"]).stdout)
    (found,) = record["byz_clip21"]
    problem = theory.Problem(69, theory.Heterogeneity(1.0, 1.0))
    known = (problem, 7, 2, record["rules"][0]["kappa"], 400)
    assert found["5.1"]["total"] == theory.clipped_order(*known, 0.1, 0.3).total
    assert found["D.1"]["total"] == theory.clipped_order(*known, 0.1, 0.3, 2.0).total
    assert found["5.2"]["total"] == theory.momentum_bound(*known, 0.05, 0.1).total
    text = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*SIZES, "--clip", "0.1"]).stdout
    assert "needs --clip, --longest" in text
    assert "needs --lr" in text


@pytest.mark.parametrize(
    "more",
    [
        ("--longest", "2"),
        ("--clip", "0"),
        ("--clip", "1", "--longest", "nan"),
        ("--lr", "9"),
        ("--rounds", "0"),
        ("--gap", "nan"),
        ("--g", "nan"),
        ("--g-cov", "1e308"),
        ("--convexity", "1e-320"),
        ("--epsilon", "1e-320"),
        ("--gradients", "none.npy"),
        ("-f", "4"),
    ],
)
def test_what_no_theorem_is_about_is_refused(more: tuple[str, ...]) -> None:
    refused = CliRunner().invoke(app, [*SIZES, *more])
    assert isinstance(refused.exception, UserError), refused.output


@pytest.mark.parametrize("kind", ["words", "array of words", "archive", "records", "complex"])
def test_what_is_no_file_of_gradients_is_called_so(kind: str, tmp_path: Path) -> None:
    """Numpy advises to load words unsafely, and loads the others."""
    file, ones = tmp_path / "gradients.npy", np.ones((2, 5))
    with file.open("wb") as there:
        if kind == "words":
            there.write(b"hello")
        elif kind == "archive":
            np.savez(there, ones=ones)
        else:
            records = np.zeros(2, dtype=[("one", float), ("two", float)])
            np.save(there, {"array of words": np.array([["a"]]), "complex": 1j * ones}.get(kind, records))
    refused = CliRunner().invoke(app, [*SIZES, "--gradients", str(file)]).exception
    assert str(refused) == f"no gradients in {file}: it is no .npy file of numbers"
