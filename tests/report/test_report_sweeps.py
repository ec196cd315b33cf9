"""What a sweep gave: rows, tables by two keys, files, and what is said about cells without a result."""

from __future__ import annotations

import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trilemma as tl
from damage import files_up_to
from trilemma import report, simulate
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.records import Spread, Summary
from trilemma.cli import app
from trilemma.experiment.sweep import sweep
from trilemma.report.cross_table import Cross, TableSquare
from trilemma.report.sweeps import _square
from trilemma.simulate.sweep import grid as on_disk
from trilemma.simulate.sweep.work import work


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rules, two attacks, two seeds; one cell of a batch that cannot be."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    raw = {"federation": {"clients": 7, "byzantine": 2}, "run": {"rounds": 4, "seeds": [1, 2]}}
    axes = {"aggregation.rule": ["mean", "caf"], "attack.name": ["sf", "ipm"]}
    cells = (*sweep({**raw, "sweep": axes}).cells, *sweep(raw, ["algorithm.batch_size=9000"]).cells)

    def run(jobs, at_once, watcher) -> None:
        for job in jobs:
            watcher.ended(job, work(job, lambda rounds: None))

    with pytest.MonkeyPatch.context() as change:
        change.setattr(on_disk, "run_jobs", run)
        simulate.run_cells(cells, folder)
    return folder


@pytest.mark.parametrize("ending", ["csv", "parquet", "png"])
def test_a_table_is_written_whole_or_not_at_all(out: Path, tmp_path: Path, ending: str) -> None:
    to = tmp_path / f"table.{ending}"
    command = ["table", str(out), "--rows", "aggregation.rule", "--format", ending, "--to", str(to)]
    with files_up_to(100):
        told = CliRunner().invoke(app, command).exception
    assert isinstance(told, OSError)
    assert told.filename == str(to)
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_cannot_be_read_is_named(out: Path, tmp_path: Path) -> None:
    """Every cell has such a file: without its folder nobody finds the one that is broken."""
    shutil.copytree(out, tmp_path / "out")
    broken = sorted((tmp_path / "out").glob("*/summary.json"))[2]
    broken.write_text("")
    with pytest.raises(
        UserError, match=rf"{broken.parent.name}: 'summary\.json' cannot be read as the summary"
    ):
        tl.load(tmp_path / "out")


def test_a_sweep_is_read_back_with_a_row_for_each_cell_and_seed(out: Path, monkeypatch) -> None:
    found = tl.load(out)
    assert isinstance(found, report.SweepResult)
    assert found.keys == ("aggregation.rule", "attack.name")
    rows = found.rows()
    assert [(row["aggregation.rule"], row["attack.name"], row["seed"]) for row in rows[:3]] == [
        ("mean", "sf", 1),
        ("mean", "sf", 2),
        ("mean", "ipm", 1),
    ]
    summary = json.loads((out / rows[0]["cell"] / "summary.json").read_text())
    assert rows[0]["accuracy"] == summary["accuracy"]["per_seed"]["1"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="to_pandas needs pandas"):
        found.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=lambda rows: rows))
    assert found.to_pandas() == rows


def test_tables_show_worst_mean_and_best_over_what_is_not_shown(out: Path) -> None:
    found = report.load_sweep(out)
    both = found.cross("aggregation.rule", "attack.name")
    cells = {place: square.mean for place, square in both.squares.items()}
    alone = {value: found.cross("aggregation.rule", value=value) for value in ("worst", "mean", "best")}
    for rule in ("mean", "caf"):
        scores = [cells[rule, "sf"], cells[rule, "ipm"]]
        shown = [alone[value].squares[rule, ""].mean for value in ("worst", "mean", "best")]
        assert shown == pytest.approx([min(scores), sum(scores) / 2, max(scores)], abs=2e-6)
    assert "worst over attack.name" in alone["worst"].remarks
    assert any("9000" in remark for remark in both.remarks), "a cell without a result is told with its reason"
    losses = found.cross("aggregation.rule", value="worst", metric="loss").squares["mean", ""].mean
    assert losses == max(row["loss"] for row in _mean_losses(found))


def test_where_no_cells_share_a_place_nothing_is_said_to_be_averaged(out: Path) -> None:
    found = report.load_sweep(out)
    # As if attacks had been given as whole tables: the key that was swept is not the one that is shown.
    whole = {name: {"aggregation.rule": "", "attack": {}} for name in found.values}
    remarks = replace(found, values=whole).cross("aggregation.rule", "attack.name").remarks
    assert not any(remark.startswith("mean over") for remark in remarks)


def test_a_run_is_not_taken_for_a_folder_of_runs(out: Path) -> None:
    run = next(path.parent for path in out.glob("*/summary.json"))
    with pytest.raises(UserError, match="no finished runs below it: it is a run itself"):
        report.load_sweep(run)


def _mean_losses(found: report.SweepResult) -> list[dict]:
    return [{"loss": r.summary.loss.mean} for r in found.results.values() if r.summary.rule == "mean"]


def test_who_diverged_is_worst_and_never_best() -> None:
    def summary(*scores: float | None) -> Summary:
        spread = Spread.of(dict(enumerate(scores)))
        return Summary({"accuracy": spread}, spread, {}, None, 1.0, "dsgd", "mean", 3, 0, "none", "none", 9)

    cells = [summary(None, None), summary(0.5, 0.7), summary(0.8, None)]
    assert _square(cells, "worst", "accuracy") == TableSquare(None, None, 2, 3)
    assert _square(cells, "best", "accuracy") == TableSquare(0.8, 0.0, 2, 3)
    assert _square(cells, "mean", "accuracy").mean == pytest.approx(2 / 3)
    assert _square(cells[1:], "worst", "loss").mean == 0.8


def test_files(out: Path, tmp_path: Path, monkeypatch) -> None:
    arguments = ["table", str(out), "--rows", "aggregation.rule", "--columns", "attack.name"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.output.splitlines()[2] == "| aggregation.rule × attack.name | sf | ipm |"
    screen = CliRunner().invoke(app, arguments, env={"TTY_COMPATIBLE": "1", "FORCE_COLOR": "1"}).output
    assert "┃" in screen  # a terminal
    assert "| aggregation" not in screen
    plain = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert {(one["aggregation.rule"], one["attack.name"]) for one in plain} >= {
        ("caf", "sf"),
        ("mean", "ipm"),
    }
    assert isinstance(
        CliRunner().invoke(app, [*arguments, "--json", "--format", "csv"]).exception, ConfigError
    )
    text = CliRunner().invoke(app, [*arguments, "--format", "csv"]).output
    assert text.splitlines()[0] == "aggregation.rule,attack.name,metric,value,mean,std,seeds,cells"
    assert len(text.splitlines()) == 5
    picture = tmp_path / "map.png"
    CliRunner().invoke(app, [*arguments, "--format", "png", "--to", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, [*arguments, "--format", "pgn"])
    assert isinstance(refused.exception, ConfigError)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    missing = CliRunner().invoke(app, [*arguments, "--format", "parquet"])
    assert "needs pyarrow" in str(missing.exception)


def test_parquet_is_read_back(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    cross = Cross("a", "b", "mean", "accuracy", {("x", "y"): TableSquare(0.5, 0.1, 3, 1)})
    assert parquet.read_table(cross.parquet(str(tmp_path / "t.parquet"))).to_pylist() == cross.records()


def test_a_folder_of_runs_will_do(out: Path, tmp_path: Path) -> None:
    """Its keys are those in which the configurations differ."""
    for name in [*report.load_sweep(out).results][::2]:
        shutil.copytree(out / name, tmp_path / name)
    found = report.load_sweep(tmp_path)
    assert found.keys == ("aggregation.rule",)
    with pytest.raises(UserError, match=r"did you mean 'aggregation\.rule'"):
        found.cross("agregation.rule")
    with pytest.raises(UserError, match="no run was scored by 'acuracy'"):
        found.cross("aggregation.rule", metric="acuracy")
    with pytest.raises(UserError, match="there is no folder"):
        report.load_sweep(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_list_of_cells_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_bytes(content)
    with pytest.raises(UserError, match=r"sweep\.json"):
        report.load_sweep(tmp_path)
