"""A federation needs no Flower: made, run and looked at where it is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_FLOWER = """
import sys
sys.modules["flwr"] = None                  # what Python does where a package is not there: ImportError
from pathlib import Path
import typer
from typer.testing import CliRunner
from trilemma.cli.federation import federation_app
from trilemma.federation.carriers.inprocess import InProcess
from trilemma.federation.layout import parties
from trilemma.federation.server import open_run

folder = sys.argv[1]
def command(*arguments):
    outcome = CliRunner().invoke(federation_app, arguments)
    print(outcome.output if outcome.exception is None else outcome.exception)

command("init", folder, "--clients", "3", "--config", sys.argv[2])
everybody = parties(Path(folder))
print(open_run(everybody[0], "run", InProcess(everybody)).go().rounds, "rounds")
command("status", folder)
command("down", folder)
command("up", folder)
"""


@pytest.fixture
def said(tmp_path):
    from federation_harness import small_config

    (tmp_path / "config.toml").write_text(small_config(3, rounds=2))
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_FLOWER, str(tmp_path / "pilot"), str(tmp_path / "config.toml")],
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout


@pytest.mark.slow
def test_a_whole_run_without_flower(said):
    assert "\n2 rounds\n" in said
    assert "run run: finished, 2 rounds committed of 2" in said
    assert "0 processes stopped" in said
    assert "pip install 'trilemma[flower]'" in said, "only bringing processes up takes Flower"
