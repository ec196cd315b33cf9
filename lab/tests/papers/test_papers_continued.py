"""Studies that are continued: what is kept, what is added, and by which code each of it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from trilemma.base.errors import UserError
from trilemma.base.records import Spread
from trilemma.cli import app
from trilemma.experiment.sweep import leaves
from trilemma_lab.arena.arena import Row, read, record
from trilemma_lab.papers import run_studies, studies
from trilemma_lab.studies import provenance
from trilemma_lab.studies.filled import missing, partly_searched, settled
from trilemma_lab.studies.grid import Place
from trilemma_lab.studies.measured import Measured, Results, new_results, read_results, write_results
from trilemma_lab.studies.result_files import ResultFiles
from trilemma_lab.studies.staleness import Rerun
from trilemma_lab.studies.study import Study

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


def test_seeds_of_three_days_are_named_one_after_the_other() -> None:
    first = of_then(cell("a", {1: 0.5}))
    second = replace(first.merged([cell("a", {2: 0.7})]), date="2026-02-02")
    third = second.merged([cell("a", {3: 0.9})])
    parts = third.cells[0].of.split("; ")
    assert [part.partition(":")[0] for part in parts[:3]] == ["seed 3", "seed 2", "seed 1"]
    assert parts[2:] == ["seed 1: a GPU, 2026-01-01", f"code {first.code}"]


def test_seeds_that_are_put_there_again_and_again_as_runs_end_are_named_once() -> None:
    then, found = of_then(cell("a", {1: 0.5})), cell("a", {2: 0.7, 3: 0.9})
    once = then.merged([found])
    assert once.merged([found, cell("b", {2: 0.2})]).cells[0].of == once.cells[0].of


def test_a_seed_that_is_run_again_is_of_today_and_the_others_stay_of_their_day() -> None:
    second = of_then(cell("a", {1: 0.5})).merged([cell("a", {2: 0.7, 3: 0.9})])
    third = replace(second, date="2026-02-02").merged([cell("a", {3: 0.8})])
    named = [part for part in third.cells[0].of.split("; ") if part.startswith("seed")]
    here = f"{second.device}, {second.date}"
    assert named == [f"seed 3: {here}", f"seed 2: {here}", "seed 1: a GPU, 2026-01-01"]


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


def lr_of(one: Place) -> tuple[str, tuple[int, ...], float]:
    return one.row, one.config.run.seeds, one.config.algorithm.options.lr


def tried_at(one: Place, values: Mapping[int, float | None]) -> Measured:
    """What a point of a grid of step sizes gave."""
    name = f"algorithm.lr={one.config.algorithm.options.lr}"
    made = replace(cell(one.row, values), settings=one.settings)
    return replace(made, tried={name: dict(made.metrics["accuracy"].per_seed)})


def test_the_rest_of_a_grid_is_missing_before_more_seeds_are() -> None:
    """One of three step sizes was tried at a; at b it is not on record which were."""
    grid = [place(row, lr) for row in "ab" for lr in (1.0, 0.1, 0.01)]
    there = (tried_at(grid[1], {1: 0.5}), filled_by(grid[4], 1))
    left = missing(grid, Results("s", there))
    assert [lr_of(one) for one in left] == [("a", (1,), 1.0), ("a", (1,), 0.01), ("b", (2, 3), 0.1)]


def test_the_rest_of_a_grid_is_tried_with_a_seed_that_is_there_to_compare() -> None:
    grid = [place("a", lr, "1-3") for lr in (1.0, 0.1)]
    left = missing(grid, Results("s", (tried_at(grid[0], {2: 0.5, 3: 0.6}),)))
    assert [lr_of(one) for one in left] == [("a", (2,), 0.1)]


def test_another_point_of_a_grid_takes_the_place_only_where_it_is_better() -> None:
    """By the seeds that both have; what was tried stays on record either way."""
    low, high = place("a", 0.1), place("a", 1.0)
    then = of_then(tried_at(low, {1: 0.5, 2: 0.9, 3: 0.9}))
    kept = then.merged([tried_at(high, {1: 0.4})]).cells[0]
    assert (kept.settings["algorithm.lr"], kept.seeds, kept.of) == (0.1, (1, 2, 3), then.about)
    new = then.merged([tried_at(high, {1: 0.6})]).cells[0]
    assert (new.settings["algorithm.lr"], new.seeds) == (1.0, (1,))
    assert new.tried == {"algorithm.lr=0.1": {"1": 0.5, "2": 0.9, "3": 0.9}, "algorithm.lr=1.0": {"1": 0.6}}
    assert kept.tried.keys() == new.tried.keys()
    longer = then.merged([tried_at(high.with_("run.rounds=7"), {1: 0.4})]).cells[0]  # of no grid with it
    assert (longer.seeds, longer.tried) == ((1,), {"algorithm.lr=1.0": {"1": 0.4}})
    diverged = then.merged([tried_at(high, {1: None})]).cells[0]
    assert diverged.settings["algorithm.lr"] == 0.1
    assert missing([low, high], Results("s", (kept,))) == []


def test_more_seeds_of_a_cell_do_not_say_that_its_grid_was_not_searched() -> None:
    """Nothing is on record of what was tried there, and one point more of it is no search."""
    low, high = place("a", 0.1), place("a", 1.0)
    then = of_then(filled_by(low, 1))
    assert then.merged([tried_at(low, {2: 0.5})]).cells[0].tried == {}
    some = then.merged([tried_at(high, {1: 0.5})]).cells[0]
    assert some.tried == {"algorithm.lr=1.0": {"1": 0.5}}


def test_what_was_tried_is_written_and_read(tmp_path: Path) -> None:
    made = new_results("s", [tried_at(place("a", 0.1), {1: 0.5, 2: None})])
    write_results(made, tmp_path / "s.json")
    assert read_results(tmp_path / "s.json").cells[0].tried == {"algorithm.lr=0.1": {"1": 0.5, "2": None}}


def test_a_settled_grid_is_one_point_that_of_the_nearest_place_in_its_row() -> None:
    """Fewer keys apart is nearer; a cell that is there keeps its own point; a row without any is searched."""

    def at(table: str, lr: float, *changes: str) -> Place:
        return replace(place("a", lr).with_(*changes), table=table)

    def found(one: Place, **more: Any) -> Measured:
        return replace(tried_at(one, {1: 0.5}), table=one.table, tried={}, **more)

    def both(row: str, table: str) -> list[Place]:
        return [replace(at(table, lr), row=row) for lr in (1.0, 0.1)]

    wanted = [*both("a", "empty"), *both("a", "there"), *both("b", "alone")]
    near = found(at("x", 0.1, "federation.byzantine=2"))
    further = found(at("y", 1.0, "federation.byzantine=2", "run.rounds=7"))
    shown = found(wanted[2])

    def settled_by(*cells: Measured) -> list[tuple[str, float]]:
        chosen = settled(wanted, Results("s", cells))
        return [(one.table, one.config.algorithm.options.lr) for one in chosen if one.table != "alone"]

    assert settled_by(further, near) == [("empty", 0.1), ("there", 0.1)]
    assert settled_by(further, near, shown) == [("empty", 1.0), ("there", 1.0)]
    other_column = replace(shown, table="z", column="another")
    assert settled_by(other_column, near)[0] == ("empty", 1.0)  # one key apart each, by no factor
    unsearched = replace(other_column, tried={"algorithm.lr=1.0": {"1": 0.5}})
    assert settled_by(unsearched, near)[0] == ("empty", 0.1)
    results = Results("s", (further, near, shown))
    left = missing(settled(wanted, results), results)
    assert [(one.table, one.config.run.seeds) for one in left] == [
        ("empty", (1, 2, 3)),
        ("there", (2, 3)),
        ("alone", (1, 2, 3)),
        ("alone", (1, 2, 3)),
    ]


@pytest.mark.slow
def test_a_grid_that_was_settled_is_searched_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None
) -> None:
    """Of two step sizes that of the neighbour is run; without --settled the other too, then more seeds."""
    monkeypatch.chdir(tmp_path)
    first = studies["safe-dshb"].runs("1", only="multiplier 1 / smea / SF")[0].with_("run.rounds=2")
    grid = [first.with_(f"algorithm.lr={lr}") for lr in (1e-6, 0.5)]
    study = Study(
        paper="safe-dshb",
        figures="",
        left_out="",
        places=lambda seeds: [one.with_(f"run.seeds='{seeds}'") for one in grid],
        seeds="1-2",
    )
    monkeypatch.setitem(studies._things, "two-steps", study)
    neighbour = replace(tried_at(grid[0], {1: 0.5}), row=first.row, tried={})
    written = Path("lab/results") / "two-steps.json"
    write_results(of_then(neighbour), written)

    def shown(*more: str) -> Measured:
        said = CliRunner().invoke(app, ["papers", "run", "two-steps", "--missing", "--jobs", "1", *more])
        assert said.exit_code == 0, said.output
        return next(one for one in read_results(written).cells if one.place == first.at)

    only = shown("--settled", "--seeds", "1")
    assert [*only.tried] == ["algorithm.lr=1e-06"]
    assert partly_searched(study, [only]) == [only]
    both = shown()
    assert {*both.tried} == {"algorithm.lr=1e-06", "algorithm.lr=0.5"}
    assert both.seeds == (1, 2)
    better = max(both.tried, key=lambda name: both.tried[name]["1"])
    assert better == f"algorithm.lr={both.settings['algorithm.lr']}"
    assert [*both.tried[better]] == ["1", "2"]
    assert partly_searched(study, [both]) == []


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

    stamp = tmp_path / outcome.ran[0] / provenance.FILE
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "code": "0ther"}))
    (older,) = run_studies({"safe-dshb": wanted}, tmp_path)[0]["safe-dshb"]
    assert older.code == "0ther"
    assert then.merged([older]) is then  # the file knows more of it
    alone = Results("safe-dshb", ()).merged([older])
    assert alone.staleness().words == "1 of 1 cells are by code that is not known"
    stamp.unlink()
    (unknown,) = run_studies({"safe-dshb": wanted}, tmp_path)[0]["safe-dshb"]
    assert unknown.of.endswith("code not on record")
    stamp.write_text("{")
    with pytest.raises(UserError, match=provenance.FILE):
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
    path = Path("lab/results") / "byz-clip21.json"
    write_results(of_then(cell("a", {1: 0.5})), path)
    kept = path.read_bytes()
    written = Path("lab/results") / "safe-dshb.json"
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


@pytest.mark.parametrize("how", ["papers", "arena"])
def test_two_who_write_results_at_once_lose_nothing(tmp_path: Path, how: str) -> None:
    """Each reads the file, adds its own and writes it: one after the other, in one process or in two."""
    path, count = tmp_path / f"{how}.json", 12
    rows = [
        Row("phishing-7", "LDP", 3, "caf", "loss", seed, 0.5, 0, 0, 69, None) for seed in range(2 * count)
    ]
    kept = ResultFiles({how: studies["safe-dshb"]}, tmp_path)

    def write(first: int) -> None:
        for i in range(first, 2 * count, 2):
            if how == "arena":
                record(path, [rows[i]])
            else:
                kept.add(how, [cell(str(i), {1: 0.5})])

    with ThreadPoolExecutor(2) as both:
        list(both.map(write, (0, 1)))
    found = read(path) if how == "arena" else read_results(path).cells
    assert len(found) == 2 * count


def test_what_is_measured_while_cells_are_run_again_stays(tmp_path: Path, monkeypatch) -> None:
    """And what was run again says nothing about a cell that was measured anew meanwhile."""
    path = tmp_path / "safe-dshb.json"
    write_results(new_results("safe-dshb", [cell("a", {1: 0.5})]), path)
    kept = ResultFiles({"safe-dshb": studies["safe-dshb"]}, tmp_path)
    answers = [cell("b", {1: 0.7}), cell("a", {1: 0.6})]

    def meanwhile(name: str, study: Study, results: Results, *_: object) -> Results:
        again = Rerun((("t", "a", "c"),), 1, 0.0, results.code, results.date, results.device)
        kept.add(name, [answers.pop(0)])
        return results.with_rerun(again, results.sources[results.code])

    monkeypatch.setattr("trilemma_lab.studies.rerun.rerun_cells", meanwhile)
    check = ["papers", "check", "safe-dshb", "--results", str(tmp_path), "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, check).exit_code == 0
    assert [one.row for one in read_results(path).cells] == ["a", "b"]
    assert read_results(path).rerun is not None
    said = CliRunner().invoke(app, check)
    assert "measured anew" in str(said.exception)
    assert read_results(path).cells[0].metrics["accuracy"].mean == 0.6
    assert read_results(path).rerun is None


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


def test_the_time_given_ends_a_study_and_the_same_command_goes_on(tmp_path: Path, here: None) -> None:
    """No minute at all: nothing is lost and nothing fails; then it is run to its end."""
    words = [
        "papers",
        "run",
        "safe-dshb",
        "--missing",
        "--seeds",
        "1",
        "--only",
        "multiplier 1 / SF",
        "--jobs",
        "1",
    ]
    where = ["--set", "run.rounds=2", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "runs")]
    stopped = CliRunner().invoke(app, [*words, *where, "--minutes", "0"])
    assert stopped.exit_code == 0, stopped.output
    assert "the same command goes on" in stopped.output
    ran = CliRunner().invoke(app, [*words, *where])
    assert ran.exit_code == 0, ran.output
    assert len(read_results(tmp_path / "results" / "safe-dshb.json").cells) == 4
