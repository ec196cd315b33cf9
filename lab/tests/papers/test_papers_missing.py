"""What the arena lacks, and running exactly that."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma.base.errors import UserError
from trilemma.cli.app import app
from trilemma.simulate.sweep import Failure, Job, Watcher
from trilemma.simulate.sweep.grid import CellOutcome
from trilemma_lab.arena import arena, closing, missing, standings

ROW = arena.Row("phishing-7", "LDP", 3, "caf", "loss", 1, 0.8, 0, 1, 69, 1.5)


def row(**changes: object) -> arena.Row:
    return arena.Row(**{**ROW.__dict__, **changes})  # type: ignore[arg-type]


def test_what_is_missing_are_cells_that_the_strongest_liars_did_not_meet() -> None:
    everybody = [
        row(adversary=name, seed=seed) for name in missing.strongest("phishing-7") for seed in (1, 2, 3)
    ]
    lost = [row(rule="mean", accuracy=0.44)]
    some = [row(rule="cwmed", adversary="foe"), row(rule="cwmed", seed=4, adversary="errors", accuracy=0.7)]
    listed = {one[:4]: one[4:] for one in missing.table([*everybody, *lost, *some]).rows}
    place = ("phishing-7", "LDP", "3")
    assert (*place, "caf") not in listed, "all of them, with three seeds"
    assert (*place, "mean") not in listed, "it is lost"
    assert listed[*place, "cwmed"] == (
        "0.70",
        "foe (1 of 3), loss, rotated loss, rotated slanted, stretched errors, errors",
    )
    assert listed[*place, "smea"] == ("–", "anybody")
    assert not any(one[0] == "phishing-30" and one[3] == "smea" for one in listed)
    assert not any("root set" in one[3] or "alone" in one[3] for one in listed)


def test_every_cell_is_counted_once_and_one_at_chance_is_not_missing() -> None:
    everybody = [
        row(adversary=name, seed=seed) for name in missing.strongest("phishing-7") for seed in (1, 2, 3)
    ]
    rows = [*everybody, row(rule="mean", accuracy=0.56), row(rule="cwmed", accuracy=0.57)]
    counted = {one[0]: one[1:] for one in missing.tally(rows).rows}
    assert counted["phishing-7"] == ("48", "1", "1", "1", "45")
    assert counted["mnist-drawn"] == ("132", "0", "0", "0", "132")
    everything = [tuple(map(int, one)) for name, one in counted.items() if name != "all"]
    assert tuple(map(int, counted["all"])) == tuple(map(sum, zip(*everything, strict=True)))
    assert len(missing.table(rows).rows) == int(counted["all"][3]) + int(counted["all"][4])


def test_what_goes_on_learning_has_to_meet_those_who_reckon_with_it() -> None:
    """Otherwise its worst case says ≤, whoever else was met."""
    rule, order = "evidence+mean with a root set", missing.strongest("mnist-drawn")
    met = [
        row(ground="mnist-drawn", f=5, rule=rule, adversary=name, seed=seed)
        for name in order
        for seed in (1, 2, 3)
    ]
    reckoning = [replace(one, adversary="stretched unshown errors") for one in met[:3]]

    def told(rows: list[arena.Row]) -> str:
        (table,) = standings.worst(rows)
        return str(dict(one[:2] for one in table.rows)[rule])

    assert told(met) == "≤0.80"
    assert told([*met, *reckoning]) == "0.80"


def test_a_worst_case_that_may_yet_fall_says_so() -> None:
    order = missing.strongest("phishing-7")
    everybody = [row(adversary=name, seed=seed) for name in order for seed in (1, 2, 3)]
    root = [row(ground="mnist-features", f=5, rule="root set alone")]
    told = {one[0]: one[1] for table in standings.worst([*everybody, *root]) for one in table.rows}
    assert told["caf"] == "0.80"
    assert told["root set alone"] == "0.80 (1)", "no liar has a say in it"
    [table] = standings.worst(everybody[1:])
    assert table.rows == (("caf", "≤0.80 (2)"),)
    assert standings.summary(everybody[1:]).rows == (("phishing-7", "caf", "–", "–", "–", "≤0.80"),)
    assert standings.summary(everybody).rows == (("phishing-7", "caf", "–", "–", "–", "0.80"),)


def of_one_rule(rule: str):  # type: ignore[no-untyped-def]
    return lambda one: (one.ground, one.threat, one.rule) == ("phishing-7", "LDP", rule)


def test_a_cell_meets_everybody_with_one_seed_before_the_other_seeds_and_nobody_once_it_is_lost() -> None:
    order, rows, met = missing.strongest("phishing-7"), [row(adversary="errors", seed=2)], []
    for _ in range(20):
        due = list(missing.next_bouts(rows, of_one_rule("caf")))
        if not due:
            break
        [bout] = due
        met.append((bout.adversary, bout.cell.config.run.seeds))
        rows += [row(adversary=bout.adversary, seed=seed) for seed in bout.cell.config.run.seeds]
    alone = [(name, (1,)) for name in order if name != "errors"]
    rest = [(name, (1, 3) if name == "errors" else (2, 3)) for name in order]
    assert met == [*alone, *rest]
    rows = [row(adversary=order[0], accuracy=0.5)]
    assert not list(missing.next_bouts(rows, of_one_rule("caf")))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Cells that are not run: rows by rule, in the order in which they were asked for; smea fails."""
    asked: list[str] = []

    def run_cells(cells, out, *, jobs, watcher):  # type: ignore[no-untyped-def]
        failed = {}
        for cell in cells:
            job = Job(cell.name, cell.label, str(out / cell.name), {}, cell.rounds, "")
            watcher.started(job, 0)
            why = Failure("no end") if cell.config.aggregation.rule == "smea" else None
            asked.append(f"{cell.config.aggregation.rule}: {cell.values['adversary']}")
            if why is not None:
                failed[cell.name] = why
            (out / cell.name).mkdir(parents=True)
            watcher.ended(job, why)
        return CellOutcome(failed=failed)

    def rows(bouts, out):  # type: ignore[no-untyped-def]
        left = {"mean": 0.3, "caf": 0.8}
        return [
            row(rule=bout.rule, adversary=bout.adversary, seed=seed, accuracy=left[bout.rule], device="cpu")
            for bout in bouts
            if (out / bout.cell.name).exists() and bout.rule in left
            for seed in bout.cell.config.run.seeds
        ]

    monkeypatch.setattr(closing.simulate, "run_cells", run_cells)
    monkeypatch.setattr(closing.arena, "rows", rows)
    return asked


class Watched(Watcher):
    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def some(*rules: str):  # type: ignore[no-untyped-def]
    return lambda one: (one.ground, one.threat) == ("phishing-7", "LDP") and one.rule in rules


def test_exactly_what_a_file_lacks_is_run_and_put_into_it(tmp_path: Path, played: list[str]) -> None:
    kept, order = tmp_path / "rows.json", missing.strongest("phishing-7")
    arena.record(kept, [row(adversary="foe", seed=seed) for seed in (1, 2, 3)])
    done = closing.close(kept, tmp_path / "cells", Watched, wanted=some("mean", "caf", "smea"))
    assert done.ended
    assert played.count("mean: foe") == 1, "it was lost then"
    assert [one for one in played if one.startswith("mean")] == ["mean: foe"]
    assert [one for one in played if one.startswith("smea")] == ["smea: foe"], "what fails is not tried again"
    assert [failure.reason for failure in done.failed.values()] == ["no end"]
    assert [one for one in played if one.startswith("caf")] == [f"caf: {name}" for name in order[1:]] * 2
    found = arena.read(kept)
    assert {(one.adversary, one.seed) for one in found if one.rule == "caf"} == {
        (name, seed) for name in order for seed in (1, 2, 3)
    }
    assert closing.close(kept, tmp_path / "cells", Watched, wanted=some("mean", "caf")).rows == ()


def test_what_is_finished_counts_when_somebody_stops_it(
    tmp_path: Path, played: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, told = tmp_path / "rows.json", []

    class Stopping(Watched):
        def ended(self, job: object, failure: object) -> None:
            told.append(job)
            if len(told) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        closing.close(kept, tmp_path / "cells", Stopping, wanted=some("mean", "caf"))
    assert len(arena.read(kept)) == len(played) == 3


def test_the_time_given_ends_it_and_the_same_call_goes_on(tmp_path: Path, played: list[str]) -> None:
    kept, limit = tmp_path / "rows.json", time.monotonic() + 60

    class Waiting(Watched):
        def ended(self, job: object, failure: object) -> None:
            while len(played) == 2 and time.monotonic() < limit:
                time.sleep(0.01)  # until the time is over

    done = closing.close(kept, tmp_path / "cells", Waiting, wanted=some("caf"), minutes=0.5 / 60)
    assert not done.ended
    assert len(done.rows) == len(played) <= 2
    done = closing.close(kept, tmp_path / "cells", Watched, wanted=some("caf"))
    assert done.ended
    assert len(arena.read(kept)) == 18


@pytest.mark.slow
@pytest.mark.usefixtures("here", "two_rounds")
def test_what_is_missing_is_run_from_the_command_line(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    said = ["--ground", "phishing-7", "--threat", "LDP", "--rule", "caf", "--adversary", "foe"]
    said += ["--jobs", "1", "--out", str(tmp_path / "cells")]
    done = CliRunner().invoke(app, ["arena", "--missing", *said, "--results", str(kept)])
    assert done.exit_code == 0, done.output
    assert {one.adversary for one in arena.read(kept)} == {"foe"}
    again = CliRunner().invoke(app, ["arena", "--missing", *said, "--results", str(kept)])
    assert again.output.startswith("0 rows\n")


def test_a_file_says_what_it_lacks(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    arena.record(kept, [ROW])
    shown = CliRunner().invoke(app, ["arena", "--show", str(kept), "--missing"])
    assert "| phishing-7 | LDP | 3 | caf | 0.80 | foe, loss (1 of 3), rotated loss" in shown.output
    assert "| phishing-7 | 48 | 0 | 0 | 1 | 47 |" in shown.output
    for said in (
        ["--missing"],
        ["--missing", "--results", str(kept), "--quick"],
        ["--missing", "--results", str(kept), "--rule", "krum"],
        ["--missing", "--results", str(kept), "--set", "run.device=gpu"],
        ["--missing", "--results", str(kept), "--ground", "phishing-7", "--liars", "4"],
        ["--quick", "--minutes", "1"],
    ):
        assert isinstance(CliRunner().invoke(app, ["arena", *said]).exception, UserError)
