"""The arena: cells by name, rows that survive, and a table with the worst case first."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma import config, simulate
from trilemma.base.errors import UserError
from trilemma.cli.app import app
from trilemma.experiment import Cell
from trilemma.simulate import engine
from trilemma_lab.arena import arena, standings

ROW = arena.Row("phishing-7", "LDP", 3, "caf", "loss", 1, 0.8, 0, 1, 69, 1.5)


def row(**changes: object) -> arena.Row:
    return arena.Row(**{**ROW.__dict__, **changes})  # type: ignore[arg-type]


def test_rows_are_kept_and_the_same_cell_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arena.record(path, [ROW, row(seed=2, accuracy=0.7)])
    arena.record(path, [row(accuracy=0.9), row(adversary="alie")])
    assert [(one.adversary, one.seed, one.accuracy) for one in arena.read(path)] == [
        ("alie", 1, 0.8),
        ("loss", 1, 0.9),
        ("loss", 2, 0.7),
    ]


def test_a_row_says_on_which_device_it_ran_and_one_from_before_that_was_written_down_does_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.json"
    arena.record(path, [ROW])
    arena.record(path, [row(seed=2, device="cuda")])
    assert [one.device for one in arena.read(path)] == [None, "cuda"]
    assert "≤0.80 (2)" in standings.markdown(arena.read(path), "worst")
    arena.record(path, [row(device="cpu")])
    assert [one.device for one in arena.read(path)] == ["cpu", "cuda"], "it takes the place of the untold one"
    arena.record(path, [row(device="cuda", accuracy=0.7), row(device="cpu", accuracy=0.75)])
    kept = [(one.seed, one.device, one.accuracy) for one in arena.read(path)]
    assert kept == [(1, "cpu", 0.75), (1, "cuda", 0.7), (2, "cuda", 0.8)], "other noise: both count"
    assert "0.70 (2)" in standings.markdown(arena.read(path), "worst"), "two seeds"


def test_a_cell_of_the_arena_says_its_device() -> None:
    few = {"grounds": ["phishing-7"], "rules": ["caf"], "adversaries": ["loss"], "threats": ["LDP"]}
    [here], [there] = (list(arena.bouts(**few, changes=said)) for said in ((), ("run.device=cpu",)))
    assert here.cell.config.run.device in {"cpu", "cuda"}
    assert there.cell.config.run.device == "cpu"


def test_the_worst_case_is_the_least_over_adversaries_and_seeds() -> None:
    rows = [
        ROW,
        row(seed=2, accuracy=0.6),
        row(adversary="foe", accuracy=0.65),
        row(rule="mean", accuracy=0.1),
    ]
    table = standings.standings(rows)
    worst, by = table.headings.index("worst"), table.headings.index("by")
    assert [(one[5], one[worst], one[by]) for one in table.rows] == [
        ("mean", "0.10", "loss"),
        ("caf", "0.60", "loss"),
    ]
    assert table.rows[1][table.headings.index("loss")] == "0.60 (2)"


def test_every_ground_has_a_table_of_worst_cases_with_the_seeds_of_the_adversary_that_left_them() -> None:
    rows = [ROW, row(seed=2, accuracy=0.6), row(adversary="foe", accuracy=0.5), row(rule="mean", f=2)]
    rows += [row(ground="mnist-features", seed=seed, epsilon=None, d=330) for seed in (1, 2, 3)]
    features, phishing = standings.worst(rows)
    assert features.title == "mnist-features: d = 330, ε = none"
    assert features.rows == (("caf", "≤0.80"),)
    assert phishing.headings == ("rule", "LDP, f = 2", "LDP, f = 3")
    assert phishing.rows == (("mean", "≤0.80 (1)", "–"), ("caf", "–", "0.50 (1)")), "0.50 is chance"
    assert "phishing-7: d = 69, ε = 1.5" in standings.markdown(rows, "worst")


def test_where_every_rule_was_run_smea_says_why_it_was_not() -> None:
    [table] = standings.worst(
        [row(ground="phishing-30", f=10, rule=rule) for rule in ("safeguard+mean", "mean")]
    )
    assert [one[0] for one in table.rows] == ["mean", "smea", "safeguard+mean"]
    assert table.rows[1] == ("smea", "(3·10⁷ subsets)")
    assert all(one[0] != "smea" for one in standings.worst([row(rule="mean")])[0].rows), "feasible: to be run"


def test_all_rivals_of_the_arena_are_cells_and_smea_only_where_it_is_feasible() -> None:
    small = {bout.rule for bout in arena.bouts(["phishing-7"])}
    large = {bout.rule for bout in arena.bouts(["mnist-features"], liars=[5], adversaries=["loss"])}
    assert small == set(arena.RULES)
    assert large == set(arena.RULES) - {"smea"}


FEW = ["--ground", "phishing-7", "--rule", "caf", "--adversary", "foe", "--seeds", "1", "--threat", "LDP"]


@pytest.mark.slow
@pytest.mark.usefixtures("here", "two_rounds")
def test_a_cell_is_run_once_recorded_and_shown(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    said = ["arena", *FEW, "--out", str(tmp_path / "cells"), "--jobs", "1"]
    done = CliRunner().invoke(app, [*said, "--results", str(kept)])
    assert done.exit_code == 0, done.output
    [found] = arena.read(kept)
    assert (found.rule, found.adversary, found.d) == ("caf", "foe", 69)
    assert found.device in {"cpu", "cuda"}
    shown = CliRunner().invoke(app, ["arena", "--show", str(kept)])
    assert "phishing-7" in shown.output


@pytest.mark.parametrize("said", [["--missing"], FEW])
def test_runs_that_were_changed_are_not_put_among_rows_that_cannot_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(simulate, "run_cells", lambda *_, **__: pytest.fail("something is run"))
    kept = tmp_path / "rows.json"
    said = ["arena", *said, "--set", "run.device=cpu", "--set", "run.rounds=2", "--results", str(kept)]
    refused = CliRunner().invoke(app, [*said, "--out", str(tmp_path / "cells")])
    assert isinstance(refused.exception, UserError)
    assert "run.rounds=2" in str(refused.exception)
    assert "run.device" not in str(refused.exception), "a row says its device"
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_table_of_changed_runs_says_what_was_changed(tmp_path: Path) -> None:
    said = ["arena", *FEW, "--set", "run.rounds=2", "--out", str(tmp_path / "cells"), "--jobs", "1"]
    done = CliRunner().invoke(app, said)
    assert done.exit_code == 0, done.output
    assert "changed in every cell: run.rounds=2" in done.output


@pytest.mark.parametrize("fine", [0, 1])
def test_a_seed_that_diverged_is_a_row_with_nothing_right_whatever_its_last_round_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fine: int
) -> None:
    """Also where it did so in its first round, of which there is no record."""
    step = engine.step

    def diverging(experiment: engine.Experiment, progress: engine.Progress) -> object:
        if experiment.seed == 2 and progress.round == fine:
            raise engine.Diverged(fine + 1)
        return step(experiment, progress)

    monkeypatch.setattr(engine, "step", diverging)
    said = {"privacy": {"threat": "ldp", "clip": 1.0, "epsilon": 30.0, "delta": 1e-4}}
    run = {"rounds": 2, "seeds": [1, 2], "evaluate_every": 1, "device": "cpu"}
    cell = Cell({}, config.parse({**said, "run": run}))
    simulate.run(cell.config, tmp_path / cell.name)
    bout = arena.Bout("phishing-7", "LDP", 3, "caf", "foe", cell)
    well, lost = arena.rows([bout], tmp_path)
    assert (lost.seed, lost.accuracy, lost.d) == (2, 0.0, well.d)
    assert well.accuracy > 0
    assert lost.epsilon is not None
    assert fine or lost.epsilon == well.epsilon, "what it was to spend: clients noised for that"


def test_a_line_of_a_file_is_a_cell_with_its_seeds(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [ROW, row(seed=3, accuracy=0.7), row(device="cuda"), row(epsilon=None, rule="mean")]
    arena.record(path, rows)
    lines = path.read_text().splitlines()
    assert lines[3] == '["phishing-7","LDP",3,"caf","loss","cuda",69,1.5,[[1,0.8,0,1]]],'
    assert lines[4] == '["phishing-7","LDP",3,"caf","loss",null,69,1.5,[[3,0.7,0,1]]],', "1 says its device"
    assert lines[5:] == ['["phishing-7","LDP",3,"mean","loss",null,69,null,[[1,0.8,0,1]]]', "]}"]
    assert set(arena.read(path)) == set(rows[1:])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("accuracy", value) for value in ("high", math.nan, math.inf, 1.5, -0.5)),
        *(("epsilon", value) for value in ("much", math.nan, math.inf, -1.0)),
        *(("f", "3"), ("ground", "x"), ("threat", "x"), ("device", 0)),
    ],
)
def test_a_row_that_no_table_has_a_place_for_is_refused_with_its_file(
    tmp_path: Path, key: str, value: object
) -> None:
    path = tmp_path / "rows.json"
    arena.record(path, [row(**{key: value})])
    with pytest.raises(UserError, match=rf"'rows.json' cannot be read .*{value}"):
        arena.read(path)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"seed",', "", "does not begin with the columns ground, .*seed, accuracy"),
        ('"columns"', '"rows"', "does not begin with the columns"),
        (",1.5,[[", ",[[", "is not ground, threat"),
        ("[[1,0.8,0,1]]", "[[1,0.8,0]]", "is not seed, accuracy, honest, liars"),
        ("[[1,0.8,0,1]]", "[1]", "is not seed, accuracy"),
        ('"cells"', '"rows"', "cells"),
        ("[[1,0.8,0,1]]", "1", "not iterable"),
    ],
)
def test_a_damaged_file_is_refused_and_it_is_said_where(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    path = tmp_path / "rows.json"
    arena.record(path, [ROW])
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(UserError, match=rf"'rows.json' cannot be read .*{said}"):
        arena.read(path)


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    refused = CliRunner().invoke(app, ["arena", "--ground", "phishing-8"])
    assert refused.exit_code != 0
    assert "phishing-7" in str(refused.exception or refused.output)


def test_noise_that_is_shared_spends_what_ldp_does_and_ldp_keeps_its_papers_multiplier() -> None:
    few = {"grounds": ["phishing-7", "phishing-30"], "rules": ["caf"], "adversaries": ["loss"]}
    found = {(bout.ground, bout.threat): bout.cell.config.privacy for bout in arena.bouts(**few)}
    assert {threat for _, threat in found} == set(arena.THREATS)
    for (ground, threat), privacy in found.items():
        spent = {"phishing-7": 1.375, "phishing-30": 8.369}[ground]
        ldp = threat == "LDP"
        assert (privacy.epsilon, privacy.noise_multiplier) == ((None, 1.0) if ldp else (spent, None))
