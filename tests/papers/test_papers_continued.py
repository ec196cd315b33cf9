"""Studies that are continued: what is kept, what is added, and by which code each of it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from trilemma.cli import app
from trilemma.config.sweep import leaves
from trilemma.errors import UserError
from trilemma.papers import made, run_studies, studies
from trilemma.papers.filled import missing
from trilemma.papers.grid import Place
from trilemma.papers.measured import Measured, Results, new_results, read_results, write_results
from trilemma.records import Spread

SETTINGS = {"algorithm.lr": 0.5, "run.rounds": 2}


def cell(row: str, values: Mapping[int, float | None], **more: Any) -> Measured:
    seeds = tuple(values)
    settings = {**SETTINGS, "run.seeds": list(seeds), **more}
    diverged = {str(seed): 7 for seed, value in values.items() if value is None}
    return Measured(
        "t", row, "c", {"accuracy": Spread.of(values)}, seeds, diverged=diverged, settings=settings
    )


def of_then(*cells: Measured) -> Results:
    """Results of another day, on another device."""
    return replace(new_results("s", cells), date="2026-01-01", device="a GPU")


def test_nothing_new_changes_nothing_not_even_the_date() -> None:
    then = of_then(cell("a", {1: 0.5}))
    assert then.merged([]) is then


def test_more_seeds_stand_beside_those_that_are_there_and_each_says_of_when_it_is() -> None:
    then = of_then(cell("a", {1: 0.5, 2: None}), cell("b", {1: 0.1}))
    now = then.merged([cell("a", {2: 0.7, 3: 0.9})])
    found = now.cells[0]
    assert found.seeds == (1, 2, 3)
    assert found.metrics["accuracy"].per_seed == {"1": 0.5, "2": 0.7, "3": 0.9}
    assert found.settings["run.seeds"] == [1, 2, 3]
    assert found.diverged == {}
    assert found.of == f"seeds 2, 3: {now.device}, {now.date}; seed 1: a GPU, 2026-01-01; code {then.code}"
    assert found.code == then.code in now.sources
    assert now.cells[1].of == then.about


def test_more_seeds_of_the_same_day_device_and_code_are_not_older() -> None:
    assert [
        one.of for one in new_results("s", [cell("a", {1: 0.5})]).merged([cell("a", {2: 0.7})]).cells
    ] == [""]


@pytest.mark.parametrize(
    "then",
    [
        cell("a", {1: 0.5}, **{"algorithm.lr": 0.1}),  # another point of a grid
        replace(cell("a", {1: 0.5}), settings={}),  # settings that are not on record
        replace(cell("a", {1: 0.5}), metrics={"accuracy": Spread(0.5, 0.1, {})}),  # taken over by hand
        replace(cell("a", {1: 0.5}), metrics={"loss": Spread.of({1: 0.5})}),
    ],
)
def test_what_was_run_otherwise_is_replaced(then: Measured) -> None:
    assert of_then(then).merged([cell("a", {2: 0.7})]).cells == (cell("a", {2: 0.7}),)


def place(row: str, lr: float, seeds: str = "1-3") -> Place:
    return replace(studies["safe-dshb"].runs(seeds, only="SF")[0], table="t", row=row, column="c").with_(
        f"algorithm.lr={lr}"
    )


def filled_by(one: Place, *seeds: int) -> Measured:
    return replace(cell(one.row, dict.fromkeys(seeds, 0.5)), settings=dict(leaves(one.with_().config.dump())))


def test_what_is_missing_is_empty_places_and_seeds_of_what_is_shown() -> None:
    """Two points of a grid were tried at b; at d what was run is in no grid any more."""
    a, b, other, c, d = place("a", 1.0), place("b", 1.0), place("b", 0.1), place("c", 1.0), place("d", 1.0)
    there = (
        filled_by(b, 2),
        filled_by(c, 1, 2, 3),
        replace(filled_by(d, 1), settings={**filled_by(d, 1).settings, "algorithm.lr": 0.7}),
    )
    left = missing([a, b, other, c, d], Results("s", there))
    assert [(one.row, one.config.run.seeds, one.config.algorithm.options.lr) for one in left] == [
        ("a", (1, 2, 3), 1.0),
        ("b", (1, 3), 1.0),
        ("d", (1, 2, 3), 1.0),
    ]


@pytest.mark.slow
def test_a_run_that_was_finished_by_other_code_is_not_taken_for_todays(tmp_path: Path, here: None) -> None:
    wanted = [
        one.with_("run.rounds=2") for one in studies["safe-dshb"].runs("1", only="multiplier 1 / smea / SF")
    ]
    found, outcome = run_studies({"safe-dshb": wanted}, tmp_path)
    (first,) = found["safe-dshb"]
    assert first.of == ""
    then = new_results("safe-dshb", [first])
    again, later = run_studies({"safe-dshb": wanted}, tmp_path)
    assert (len(later.ran), again["safe-dshb"][0].of) == (0, "")

    stamp = tmp_path / outcome.ran[0] / made.FILE
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "code": "0ther"}))
    (older,) = run_studies({"safe-dshb": wanted}, tmp_path)[0]["safe-dshb"]
    assert older.code == "0ther"
    assert then.merged([older]) is then  # the file knows more of it
    alone = Results("safe-dshb", ()).merged([older])
    assert alone.age().words == "1 of 1 cells are by code that is not known"
    stamp.unlink()
    (unknown,) = run_studies({"safe-dshb": wanted}, tmp_path)[0]["safe-dshb"]
    assert unknown.of.endswith("code not on record")
    stamp.write_text("{")
    with pytest.raises(UserError, match=made.FILE):
        run_studies({"safe-dshb": wanted}, tmp_path)


@pytest.mark.slow
def test_a_study_of_which_nothing_is_to_be_run_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None
) -> None:
    monkeypatch.chdir(tmp_path)
    short = [
        one.with_("run.rounds=2") for one in studies["safe-dshb"].runs("1-2", only="multiplier 1 / smea / SF")
    ]
    monkeypatch.setattr(
        type(studies["safe-dshb"]),
        "runs",
        lambda self, *_, **__: short if self is studies["safe-dshb"] else [],
    )
    path = Path("results") / "byz-clip21.json"
    write_results(of_then(cell("a", {1: 0.5})), path)
    kept = path.read_bytes()
    written = Path("results") / "safe-dshb.json"
    write_results(of_then(), written)

    def run(*more: str) -> str:
        said = CliRunner().invoke(app, ["papers", "run", "safe-dshb", "byz-clip21", *more])
        assert said.exit_code == 0, said.output
        return said.output

    assert "byz-clip21: nothing to run" in run("--missing")
    assert path.read_bytes() == kept
    whole = read_results(written)
    assert whole.cells[0].seeds == (1, 2)
    write_results(replace(whole, date="2026-01-01"), written)
    assert "safe-dshb: nothing to run" in run("--missing")
    assert read_results(written).date == "2026-01-01"


def test_results_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(
        app,
        [
            "papers",
            "run",
            "safe-dshb",
            "--results",
            str(tmp_path / "file" / "below"),
            "--out",
            str(tmp_path / "out"),
        ],
    )
    assert isinstance(refused.exception, UserError)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_runs_are_shortened_from_the_command_line_and_results_say_so(tmp_path: Path, here: None) -> None:
    def run(*more: str) -> Result:
        places = ["--only", "multiplier 1 / smea / SF", "--seeds", "1", "--results", str(tmp_path)]
        said = CliRunner().invoke(app, ["papers", "run", *more, *places, "--out", str(tmp_path / "out")])
        assert (said.exit_code == 0) == ("run.rounds=2" in more), said.output
        return said

    run("safe-dshb", "--set", "run.rounds=2")
    (found,) = read_results(tmp_path / "safe-dshb.json").cells
    assert (found.settings["run.rounds"], found.seeds) == (2, (1,))
    assert "nothing to run" in run("safe-dshb", "--missing", "--set", "run.rounds=2").output
    assert "rounds" in str(run("safe-dshb", "--set", "run.rouns=2").exception)
    assert "lp-proj-theory" in str(run("safe-dshb", "lp-proj-theory", "--set", "run.rounds=3").exception)
