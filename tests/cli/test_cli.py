"""The command line as a user meets it: in its own process, exit codes and streams included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma.cli import app

TINY = ["--set", "run.rounds=4", "--set", "run.seeds=[1,2]"]


def trilemma(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from trilemma.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500, check=False)


def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    done = trilemma("run", *TINY, "--json", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert set(result["accuracy"]) == {"mean", "std", "per_seed"}
    assert list(result["accuracy"]["per_seed"]) == ["1", "2"]
    assert {"loss", "epsilon", "seconds"} <= set(result)
    assert (tmp_path / "out" / "curves.png").stat().st_size > 5000


def test_a_wrong_config_exits_2_with_a_message_and_no_traceback(tmp_path: Path) -> None:
    done = trilemma("run", "--set", "aggregation.rule=cwmde", "--json", "--out", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "did you mean 'cwmed'?" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "nothing.toml"),
        ("run", "--set", "federation.byzantine=5"),
        ("run", "--resume", "nowhere"),
        ("run", "--seeds", "x"),
        ("run", "--device", "tpu"),
        ("list", "rulse"),
    ],
)
def test_bad_input_is_a_user_error(arguments: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    from trilemma.errors import UserError

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_resume_of_a_finished_run_prints_the_same_result(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(app, ["run", *TINY, "--json", "--out", "out"])
    again = CliRunner().invoke(app, ["run", "--resume", "out", "--json"])
    assert json.loads(first.stdout) == json.loads(again.stdout)


def test_table_shows_accuracy_beside_the_rest(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = ["--set", "federation.byzantine=2", "--set", "attack.name=sf", "--baseline"]
    result = CliRunner().invoke(app, ["run", *TINY, *changes, "--out", "out"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for word in ("2 of 7", "sf", "∞", "no liars %"):
        assert word in result.output
    assert "--baseline" not in result.output


def test_list_shows_every_registered_name() -> None:
    result = CliRunner().invoke(app, ["list", "--json"])
    listing = json.loads(result.stdout)
    assert {"mean", "cwmed"} <= set(listing["rules"])
    assert {"sf", "lf"} <= set(listing["attacks"])
    assert all(line for kind in listing.values() for line in kind.values()), "one line each"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_demo_shows_that_robust_rules_survive(tmp_path: Path) -> None:
    done = trilemma("demo", "--out", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summaries = [json.loads(p.read_text()) for p in sorted((tmp_path / "demo").glob("*/summary.json"))]
    by_setting = {(s["rule"], s["attack"]): s["accuracy"]["mean"] for s in summaries}
    assert by_setting["mean", "ipm"] < by_setting["caf", "ipm"] - 0.3
    assert by_setting["caf", "sf"] > by_setting["mean", "none"] - 0.03
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 10_000
