"""How long studies take is estimated from a few rounds, kept, and said before a quick look."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma.base.errors import UserError
from trilemma.cli import app
from trilemma_lab.papers import studies
from trilemma_lab.studies import estimate
from trilemma_lab.studies.estimate import Estimate


def test_runs_are_counted_by_seed_and_longer_ones_take_longer() -> None:
    first, second = studies["safe-dshb"].runs("1-3", only="SF")[:2]
    quiet = [place.with_("privacy={threat='none'}", "run.rounds=2") for place in (first, second)]
    found = estimate.estimate(quiet)
    assert found.runs == 6
    longer = estimate.estimate([place.with_("run.rounds=4000") for place in quiet])
    assert longer.seconds > 10 * found.seconds > 0


def test_a_row_counts_for_as_many_runs_as_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SAFE-DSHB the rows under attack have four times as many runs as those without."""
    seconds = {"smea": {"ALIE (searched)": 34.0, "LF": 2.0}, "nobody lies, mean": {"no attack": 1.0}}
    monkeypatch.setattr(estimate, "_seconds", lambda place: seconds[place.row][place.column])
    places = [place for place in studies["safe-dshb"].runs("1", quick=True) if place.row in seconds]
    assert estimate.estimate(places) == Estimate(10, (8 * 18.0 + 2 * 1.0) / 10)


def test_a_grid_counts_once_for_each_of_its_points() -> None:
    place = studies["safe-dshb"].runs("1-3", only="SF")[0].with_("run.rounds=2")
    assert estimate.estimate([place, place.with_("algorithm.lr=0.5")]).runs == 2


def test_estimates_are_kept_beside_others_and_said_before_a_quick_look(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert estimate.kept(Path("lab/results")) == ({}, "")
    study = studies["safe-dshb"]
    short = [place.with_("run.rounds=2") for place in study.runs("1", only="SF")[:1]]
    monkeypatch.setattr(type(study), "runs", lambda *_, **__: short)
    Path("lab/results").mkdir(parents=True)
    estimate.keep({"other": Estimate(8, 30.0)}, Path("lab/results"))
    said = CliRunner().invoke(app, ["papers", "run", "safe-dshb", "--quick", "--estimate"])
    assert said.exit_code == 0, said.output
    assert "together about" in said.output
    found, where = estimate.kept(Path("lab/results"))
    assert found["other"].minutes(2) == 2.0
    assert found["safe-dshb"].runs == 1
    assert where
    assert not Path("runs").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"studies": {"a": {"runs": "many", "seconds": 1}}}'])
def test_estimates_that_cannot_be_read_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / estimate.KEPT).write_text(content)
    with pytest.raises(UserError, match=estimate.KEPT):
        estimate.kept(tmp_path)
