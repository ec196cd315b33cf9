"""Results whose sources have changed: cells of them run again, and what is said about them then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trilemma.base.errors import UserError
from trilemma.base.records import Spread
from trilemma.simulate import CellOutcome, Watcher
from trilemma.simulate.sweep.work import Failure
from trilemma_lab.papers import Study, run_studies, studies
from trilemma_lab.studies.measured import Results, new_results, read_results, write_results
from trilemma_lab.studies.rerun import rerun_cells

SHORT = ("run.rounds=2", "run.evaluate_every=2")


@pytest.fixture
def study() -> Study:
    """Two cells of SAFE-DSHB, two rounds each."""
    whole = studies["safe-dshb"]
    return replace(
        whole,
        places=lambda seeds: [place.with_(*SHORT) for place in whole.runs(seeds, only="SF")[:2]],
    )


@pytest.fixture
def results(study: Study, tmp_path: Path, here: None) -> Results:
    wanted = [place.with_("run.seeds=[2]") for place in study.places("1")]
    found, _ = run_studies({"safe-dshb": wanted}, tmp_path / "before", jobs=1)
    return new_results("safe-dshb", found["safe-dshb"])


def again(study: Study, results: Results, out: Path, count: int = 5) -> Results:
    return rerun_cells("safe-dshb", study, results, count, out, 1, Watcher())


def test_cells_that_come_out_the_same_say_so_beside_the_mark(
    study: Study, results: Results, tmp_path: Path
) -> None:
    sources = {**results.sources[results.code], "gone.py": "1"}
    older = replace(results, code="older", sources={"older": sources})
    checked = again(study, older, tmp_path / "runs")
    assert checked.rerun is not None
    assert (len(checked.rerun.places), checked.rerun.same, checked.rerun.furthest) == (2, 2, 0.0)
    write_results(checked, tmp_path / "s.json")
    age = read_results(tmp_path / "s.json").staleness()
    assert age.changed == ("gone.py",)
    assert age.words.endswith("gone.py; 2 of 2 cells run again by this code are the same")
    changed = {**checked.sources, checked.rerun.code: {"simulate/engine.py": "1"}}
    assert "run again by code of" in replace(checked, sources=changed).staleness().words
    assert "run again" not in replace(results, rerun=checked.rerun).staleness().words


def test_a_cell_that_comes_out_otherwise_is_told_by_how_much(
    study: Study, results: Results, tmp_path: Path
) -> None:
    first, second = results.cells
    metrics = dict(first.metrics)
    value = metrics["accuracy"].per_seed["2"]
    assert value is not None
    metrics["accuracy"] = Spread.of({2: 2 * value})
    other = replace(results, cells=(replace(first, metrics=metrics), second))
    found = again(study, other, tmp_path / "runs").rerun
    assert found is not None
    assert (found.same, found.furthest) == (1, 0.5)
    assert found.words(today=True).endswith("is the same, others differ by up to 50 %")


def test_what_cannot_be_compared_is_refused(study: Study, results: Results, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="draws other numbers"):
        again(study, replace(results, device="another"), tmp_path)
    lost = replace(results, cells=tuple(replace(cell, settings={}) for cell in results.cells))
    with pytest.raises(UserError, match="not on record"):
        again(study, lost, tmp_path)


def test_cells_that_give_no_result_are_not_called_the_same(
    study: Study, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = CellOutcome(failed={"SF": Failure("no memory")})
    monkeypatch.setattr(
        "trilemma_lab.studies.rerun.run_studies", lambda *_, **__: ({"safe-dshb": []}, failed)
    )
    with pytest.raises(UserError, match="1 of 2 cells of safe-dshb gave no result: SF: no memory"):
        again(study, results, tmp_path)
