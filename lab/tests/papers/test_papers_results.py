"""Results as data: written by runs, judged against the papers' numbers, and what the pages show."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma import __version__
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.records import Spread
from trilemma.cli import app
from trilemma.report import load
from trilemma_lab import pages
from trilemma_lab.papers import run_studies, studies
from trilemma_lab.papers.byz_clip21 import GRID
from trilemma_lab.papers.published import Cause, Claim, Paper, Printed, paper
from trilemma_lab.studies import figures
from trilemma_lab.studies.claims import judged, sentences
from trilemma_lab.studies.figures import picture_of
from trilemma_lab.studies.filled import Filled, altogether, filled
from trilemma_lab.studies.measured import (
    Measured,
    Results,
    best,
    new_results,
    pooled,
    read_results,
    write_results,
)
from trilemma_lab.studies.staleness import Rerun
from trilemma_lab.studies.verdicts import orderings, verdict_table, verdicts

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "lab" / "results"


def ours(row: str, mean: float | None, std: float = 0.01) -> Measured:
    return Measured("t", row, "c", {"accuracy": Spread(mean, std, {})})


def theirs(row: str, value: float | None = None, **more) -> Printed:
    return Printed("s", row, "c", "Figure 1", value=value, **more)


def kinds(cells: list[Measured], printed: list[Printed], causes: tuple[Cause, ...] = ()) -> list[str]:
    found = verdicts(Results("s", tuple(cells)), Paper("a paper", tuple(printed), causes))
    return [one.kind for one in found]


def test_a_difference_within_both_spreads_agrees() -> None:
    printed = [theirs("a", 0.80, std=0.01, within=0.01)]
    assert kinds([ours("a", 0.829)], printed) == ["agrees"]
    assert kinds([ours("a", 0.831)], printed) == ["differs"]
    assert kinds([ours("a", 0.829, std=0.0)], printed) == ["differs"]


def test_what_agrees_by_a_wide_spread_alone_says_so() -> None:
    printed = Paper("a paper", (theirs("a", 0.98),))
    wide, narrow = ours("a", 0.69, std=0.36), ours("a", 0.97, std=0.02)
    assert [one.words for one in verdicts(Results("s", (narrow,)), printed)] == ["agrees"]
    (one,) = verdicts(Results("s", (wide,)), printed)
    assert (one.kind, one.words) == ("agrees", "agrees, but only by a wide spread (-29.0)")


def test_bounds_and_stars() -> None:
    assert kinds([ours("a", 0.29)], [theirs("a", below=0.3)]) == ["agrees"]
    assert kinds([ours("a", 0.31)], [theirs("a", below=0.3)]) == ["differs"]
    over = verdicts(Results("s", (ours("a", 0.31),)), Paper("a paper", (theirs("a", below=0.3),)))
    assert [one.words for one in over] == ["differs by +1.0"]
    assert kinds([ours("a", None)], [theirs("a")]) == ["agrees"]
    assert kinds([ours("a", None)], [theirs("a", 0.5)]) == ["differs"]
    assert kinds([ours("a", 0.5)], [theirs("a")]) == ["differs"]


def test_the_order_is_that_to_all_others_the_paper_can_tell_apart() -> None:
    printed = [theirs("a", 0.50, within=0.01), theirs("b", 0.70, within=0.01), theirs("c", 0.71, within=0.01)]
    shifted = [ours("a", 0.60), ours("b", 0.80), ours("c", 0.79)]
    assert kinds(shifted, printed) == ["ordering agrees"] * 3
    assert kinds([ours("a", 0.60), ours("b", 0.58)], printed[:2]) == ["differs"] * 2


@pytest.mark.parametrize(
    ("says", "mean", "words"),
    [
        ("beats", 0.84, "agrees"),
        ("beats", 0.81, "ordering agrees"),
        ("beats", 0.79, "differs by -1.0 from b"),
        ("matches or beats", 0.775, "agrees"),
        ("matches or beats", 0.76, "differs by -4.0 from b"),
        ("matches or beats", None, "differs: a diverged"),
        ("is close to", 0.775, "differs by +7.5 from c"),
    ],
)
def test_a_claim_is_held_against_the_row_that_fits_it_least(
    says: str, mean: float | None, words: str
) -> None:
    claim = Claim("s", "a", says, ("b", "c", "d"), "Figure 1", within=0.01)
    cells = (ours("a", mean), ours("b", 0.80), ours("c", 0.70))
    found = judged(Results("s", cells), Paper("a paper", (), (), (claim,)))
    assert [one.words for one in found] == [words]


def elsewhere(row: str, mean: float, table: str = "t", column: str = "c", **more) -> Measured:
    return Measured(table, row, column, {"accuracy": Spread(mean, 0.01, {})}, (1, 2, 3), **more)


@pytest.mark.parametrize(
    ("mean", "kind", "unclear"), [(0.75, "agrees", False), (0.71, "agrees", False), (0.60, "differs", False)]
)
def test_a_claim_may_say_by_how_much_and_where_the_others_stand(
    mean: float, kind: str, unclear: bool
) -> None:
    claim = Claim("s", "a", "is behind", ("b",), "Figure 1", within=0.02, by=0.08, there={"column": "d"})
    results = Results("s", (elsewhere("a", mean), elsewhere("b", 0.80, column="d"), elsewhere("b", 0.1)))
    (found,) = judged(results, Paper("a paper", (), (), (claim,)))
    assert (found.kind, found.unclear) == (kind, unclear)


@pytest.mark.parametrize(("mean", "kind"), [(0.6, "agrees"), (0.68, "ordering agrees"), (0.75, "differs")])
def test_a_gap_is_wider_here_than_there(mean: float, kind: str) -> None:
    """There it is ten points; here b is at 80."""
    claim = Claim("s", "a", "has a wider gap", ("b",), "Figure 1", tables=("t",), there={"table": "u"})
    here = (elsewhere("a", mean), elsewhere("b", 0.8))
    there = (elsewhere("a", 0.6, "u"), elsewhere("b", 0.7, "u"))
    (found,) = judged(Results("s", (*here, *there)), Paper("a paper", (), (), (claim,)))
    assert found.kind == kind
    assert judged(Results("s", (here[0], *there)), Paper("a paper", (), (), (claim,))) == []


def test_what_agrees_by_its_spreads_alone_is_not_called_holding() -> None:
    claim = Claim("s", "a", "matches or beats", ("b",), "Figure 1", within=0.05)
    wide = replace(elsewhere("a", 0.6), metrics={"accuracy": Spread(0.6, 0.3, {})})
    results, printed = Results("s", (wide, elsewhere("b", 0.8))), Paper("a paper", (), (), (claim,))
    (found,) = judged(results, printed)
    assert found.words == "agrees, but only by a wide spread (-20.0)"
    (said,) = sentences(printed.claims, results, printed)
    assert not said.holds
    assert said.verdict.startswith("cannot be told")


def test_of_losses_less_is_ahead_and_a_bound_can_fail() -> None:
    cells = tuple(Measured("t", row, "c", {"train_loss": Spread(one, 0.0, {})}, (1,)) for row, one in LOSSES)
    ahead = Claim("s", "a", "beats", ("b",), "Figure 1", metric="train_loss")
    below = Claim("s", "b", "stays below", (), "Figure 1", metric="train_loss", by=0.693)
    found = judged(Results("s", cells), Paper("a paper", (), (), (ahead, below)))
    assert [one.kind for one in found] == ["agrees", "differs"]


LOSSES = (("a", 0.3), ("b", 0.7))


def test_runs_of_unequal_length_are_not_compared() -> None:
    claim = Claim("s", "a", "beats", ("b",), "Figure 1")
    printed = Paper("a paper", (theirs("a", 0.9), theirs("b", 0.5)), (), (claim,))
    lengths = [elsewhere(row, 0.8, settings={"run.rounds": t}) for row, t in (("a", 20), ("b", 200))]
    assert judged(Results("s", tuple(lengths)), printed) == []
    assert [one.pairs for one in orderings(Results("s", tuple(lengths)), printed)] == [0]
    alike = (elsewhere("a", 0.4), elsewhere("b", 0.8))
    assert [(one.pairs, one.alike) for one in orderings(Results("s", alike), printed)] == [(1, 0)]


def test_a_verdict_says_of_how_many_seeds_it_is() -> None:
    printed = Paper("a paper", (theirs("a", 0.5),), seeds={"s": 5})
    three = (replace(ours("a", 0.5), seeds=(1, 2, 3)),)
    assert verdict_table("s", Results("s", three), printed).rows[0][-2] == "3 of 5"


def test_a_claim_is_about_the_tables_and_columns_it_names() -> None:
    claim = Claim("s", "a", "beats", ("b",), "Figure 1", columns=("another",))
    cells = (ours("a", 0.9), ours("b", 0.8))
    assert judged(Results("s", cells), Paper("a paper", (), (), (claim,))) == []
    assert judged(Results("s", cells[:1]), Paper("a paper", (), (), (replace(claim, columns=()),))) == []


def test_a_known_cause_stands_beside_a_difference_alone() -> None:
    causes = (Cause("s", "because", rows=("a",)),)
    printed = Paper("a paper", (theirs("a", 0.5), theirs("b", 0.5)), causes)
    results = Results("s", (ours("a", 0.9), ours("b", 0.9)))
    assert [one.cause for one in verdicts(results, printed)] == ["because", ""]
    assert [one.cause for one in verdicts(Results("s", (ours("a", 0.5),)), printed)] == [""]


def test_of_several_causes_the_first_about_the_number_is_shown() -> None:
    causes = (
        Cause("s", "another table", tables=("u",)),
        Cause("s", "another metric", metrics=("variance",)),
        Cause("s", "this", tables=("t",), metrics=("accuracy",)),
        Cause("s", "later"),
    )
    found = verdicts(Results("s", (ours("a", 0.9),)), Paper("a paper", (theirs("a", 0.5),), causes))
    assert [one.cause for one in found] == ["this"]


@pytest.mark.parametrize("name", [name for name in studies if (KEPT / f"{name}.json").is_file()])
def test_every_difference_from_a_paper_has_a_cause_or_is_called_unexplained(name: str) -> None:
    """A cause says "not explained" where none was found; empty means that nobody has looked."""
    results, printed = (
        read_results(KEPT / f"{name}.json"),
        paper(studies[name].paper).of(name),
    )
    found = [*verdicts(results, printed), *judged(results, printed)]
    assert [one.cell.place for one in found if one.kind == "differs" and not one.cause] == []


def test_several_columns_and_metrics_are_a_table_for_each_metric() -> None:
    both = {"accuracy": Spread.of({1: 0.5}), "loss": Spread.of({1: 2.0})}
    cells = (Measured("t", "r", "a", both, (1,)), Measured("t", "r", "b", both, (1,)))
    nothing = Paper("a paper", ())
    whole = pages.markdown(Results("s", cells), nothing)
    assert "**t: accuracy**" in whole
    assert "**t: loss**" in whole
    assert "|  | a | b |" in whole
    one = pages.markdown(Results("s", cells), nothing, "t", "loss")
    assert "accuracy" not in one
    beside = pages.markdown(Results("s", cells[:1]), nothing)
    assert "|  | accuracy | loss |" in beside


def test_of_several_runs_at_one_place_the_best_is_shown() -> None:
    tried = [ours("a", 0.5), ours("a", 0.7), ours("a", None), ours("b", 0.1)]
    assert [cell.metrics["accuracy"].mean for cell in best(tried)] == [0.7, 0.1]


def test_seeds_go_together_though_a_file_keeps_settings_in_another_order() -> None:
    """What is read back says first what all cells share, and seeds of today are put beside it."""
    told = ({"x": 1, "run.seeds": [1], "y": 2}, {"y": 2, "x": 1, "run.seeds": [2]}, {"y": 3, "x": 1})
    one, two, other = (
        Measured("t", "r", "c", {"accuracy": Spread.of({seed: 0.5})}, (seed,), settings=settings)
        for seed, settings in enumerate(told, 1)
    )
    assert [cell.seeds for cell in pooled([one, two, other])] == [(1, 2), (3,)]


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    cells = [
        Measured("t", row, "c", {"accuracy": Spread.of({1: 0.5, 2: 0.7})}, (1, 2), {"pld": 1.5}, {}, settings)
        for row, settings in (("a", {"x": 1, "y": 2}), ("b", {"x": 1, "z": 3}))
    ]
    results = new_results("s", cells)
    write_results(results, tmp_path / "s.json")
    assert read_results(tmp_path / "s.json") == results
    again = results.merged([ours("a", 0.9)])
    assert [cell.metrics["accuracy"].mean for cell in again.cells] == [0.9, cells[1].metrics["accuracy"].mean]
    assert again.staleness().words == ""
    older = replace(results, code="", date="", device="").merged([ours("a", 0.9)])
    assert [cell.of for cell in older.cells] == [
        "",
        "device unknown, date unknown; code before results were kept as data",
    ]
    assert older.staleness().words == "1 of 2 cells are by code that is not known"
    write_results(older, tmp_path / "older.json")
    assert read_results(tmp_path / "older.json") == older
    with pytest.raises(UserError, match="there are no results"):
        read_results(tmp_path / "other.json")


def test_the_version_of_results_needs_no_installed_package(monkeypatch) -> None:
    """Sources on PYTHONPATH have no metadata; this used to end a study at its first result."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: pytest.fail(f"{name} is not installed"))
    assert new_results("s", ()).version == __version__


def test_results_that_could_not_be_written_are_refused_before_anything_is_run(tmp_path, monkeypatch) -> None:
    """Also where the folder is there: a disk that is full, or that may only be read."""

    def full(**_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("safe-dshb", "cafcor-mnist"):
        write_results(Results(name, ()), tmp_path / f"{name}.json")
    for work in ("trilemma_lab.papers.run_studies", "trilemma_lab.studies.rerun.rerun_cells"):
        monkeypatch.setattr(work, lambda *_, **__: pytest.fail("something was run"))
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    for asked in ("run", "check"):
        ran = CliRunner().invoke(app, ["papers", asked, "safe-dshb", "--results", str(tmp_path)])
        assert str(ran.exception) == f"no file can be made in {str(tmp_path)!r} (No space left on device)"
    (tmp_path / "cafcor-mnist.json").write_text("{")
    with pytest.raises(UserError, match=r"'cafcor-mnist\.json' cannot be read"):
        CliRunner().invoke(
            app,
            ["papers", "check", "safe-dshb", "cafcor-mnist", "--results", str(tmp_path)],
            catch_exceptions=False,
        )


@pytest.mark.parametrize("asked", [["papers", "run"], ["papers", "check"], ["arena", "--quick"]])
def test_a_lock_that_cannot_be_held_is_told_before_anything_is_run(tmp_path, monkeypatch, asked) -> None:
    """Another user's, or a link that somebody put there."""
    for work in ("_lab.papers.run_studies", "_lab.studies.rerun.rerun_cells", ".simulate.run_cells"):
        monkeypatch.setattr(f"trilemma{work}", lambda *_, **__: pytest.fail("something was run"))
    kept = tmp_path / "safe-dshb.json"
    (tmp_path / ".safe-dshb.json.lock").symlink_to(tmp_path / "elsewhere")
    if asked[0] == "papers":
        write_results(Results("safe-dshb", ()), kept)
        asked = [*asked, "safe-dshb"]
    ran = CliRunner().invoke(app, [*asked, "--results", str(tmp_path if asked[0] == "papers" else kept)])
    assert "must be a file that you may write (Too many levels of symbolic links)" in str(ran.exception)


def test_a_note_stays_as_long_as_one_of_its_cells_does() -> None:
    results = replace(new_results("s", [ours("a", 0.5), ours("b", 0.5)]), note="measured by hand")
    assert results.merged([ours("a", 0.9)]).note == "measured by hand"
    assert results.merged([ours("c", 0.9)]).note == "measured by hand"
    assert results.merged([ours("a", 0.9), ours("b", 0.9)]).note == ""


def test_what_was_run_again_stays_as_long_as_it_is_not_measured_anew() -> None:
    again = Rerun((("t", "a", "c"),), 1, 0.0, "1a2b", "2026-11-16", "a CPU")
    results = new_results("s", [ours("a", 0.5), ours("b", 0.5)]).with_rerun(again, {"keys.py": "0000"})
    kept = results.merged([ours("b", 0.9)])
    assert kept.rerun == again
    assert kept.sources["1a2b"] == {"keys.py": "0000"}
    anew = results.merged([ours("a", 0.9)])
    assert anew.rerun is None
    assert "1a2b" not in anew.sources


def test_a_deviation_below_zero_is_refused_with_its_place(tmp_path: Path) -> None:
    """No figure can be drawn of it."""
    write_results(Results("s", (ours("a", 0.5, -0.01),)), tmp_path / "s.json")
    with pytest.raises(UserError, match=r"std: .*no less than 0"):
        read_results(tmp_path / "s.json")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_mean_that_is_no_number_is_refused_with_its_place(tmp_path: Path, value: float) -> None:
    """It would stand in a table as `nan`, and differ from the paper by that."""
    write_results(Results("s", (ours("a", value),)), tmp_path / "s.json")
    with pytest.raises(UserError, match=r"metrics\.accuracy\.mean: .*finite"):
        read_results(tmp_path / "s.json")


@pytest.mark.parametrize("name", studies)
def test_kept_results_are_of_places_of_their_study(name: str) -> None:
    path = KEPT / f"{name}.json"
    if not path.exists():
        pytest.skip("has not been run yet")
    if studies[name].compute is not None:
        pytest.skip("has no runs")
    places = {place.at for place in studies[name].grid}
    assert {cell.place for cell in read_results(path).cells} <= places


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("results.md", 4),
        ("personal-tables.md", 4),
        ("frontier.md", 2),
        ("frontier-tables.md", 2),
        ("short-clip.md", 2),
    ],
)
def test_pages_show_what_the_files_hold(name: str, blocks: int) -> None:
    """Fails where a page or a file in results/ was changed alone: make docs-results."""
    text = (ROOT / "docs" / name).read_text("utf-8")
    assert len(pages.BLOCK.findall(text)) >= blocks
    assert pages.page(text, KEPT) == text


@pytest.mark.slow
def test_a_study_is_run_compared_and_drawn(tmp_path: Path, monkeypatch, here: None) -> None:
    """Two rounds of four runs of SAFE-DSHB, by the commands a user types."""
    monkeypatch.chdir(tmp_path)
    study = studies["safe-dshb"]
    short = study.runs("1", only="SF")[:4]
    monkeypatch.setattr(type(study), "runs", lambda *_, **__: [p.with_("run.rounds=2") for p in short])
    ran = CliRunner().invoke(app, ["papers", "run", "safe-dshb"])
    assert ran.exit_code == 0, ran.output
    results = read_results(tmp_path / "lab" / "results" / "safe-dshb.json")
    assert [cell.row for cell in results.cells] == ["smea", "filter", "caf", "mean"]
    assert results.cells[0].settings["run.rounds"] == 2
    assert {"pld", "rdp"} <= set(results.cells[0].epsilon)
    compared = CliRunner().invoke(app, ["papers", "compare", "safe-dshb"])
    assert "| smea | SF | Discussion |" in compared.output
    assert "differs: " in compared.output
    listed = CliRunner().invoke(app, ["papers", "list"], env={"COLUMNS": "80"}).output.splitlines()
    assert "cafcor-costs          CafCor, Table 1: what rules cost beside averaging, n = 30," in listed
    here = listed.index(next(line for line in listed if line.startswith("safe-dshb ")))
    assert listed[here + 1].strip() == "4 runs, quick 4; filled: 4 of 54, 0 with all seeds"
    assert listed[here + 2].strip() == f"results of {results.date}"
    drawn = CliRunner().invoke(app, ["papers", "figure", "safe-dshb"])
    assert drawn.output.strip() == "safe-dshb.png"
    assert (tmp_path / "safe-dshb.png").read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, ["papers", "run", "safe-dsbh"])
    assert isinstance(refused.exception, ConfigError)


def test_how_many_places_of_a_table_are_filled() -> None:
    """Two cells of Figure 2: one with all three seeds, one with the first; and one that no table has."""
    study, table = studies["byz-clip21-figure2"], "CNN, f = 5, LF"
    scores = {"accuracy": Spread.of({1: 0.5})}
    cells = [
        Measured(table, "SAFE-DSHB", "ε = 3", scores, (1, 2, 3)),
        Measured(table, "SAFE-DSHB", "ε = 8", scores, (1,)),
        Measured(table, "SAFE-DSHB", "ε = 9", scores, (1,)),
    ]
    found = filled(study, Results("byz-clip21-figure2", tuple(cells)))
    assert found[table] == Filled(15, 2, 1)
    assert found["MLP, f = 1, LF"] == Filled(15, 0, 0)
    assert altogether(found) == Filled(90, 2, 1)


def test_a_grid_is_tried_with_the_first_seed_and_the_best_of_it_run_with_the_others(
    tmp_path: Path, here: None
) -> None:
    """Two rounds of SAFE-DSHB at two step sizes in one place, and of one more without a choice."""
    smea, other = (
        place.with_("run.rounds=2", "run.seeds='1-3'")
        for place in studies["safe-dshb"].runs("1", only="SF")[:2]
    )
    wanted = [smea.with_("algorithm.lr=1e-6"), smea.with_("algorithm.lr=0.5"), other]
    found, outcome = run_studies({"safe-dshb": wanted}, tmp_path / "runs")
    assert not outcome.failed
    assert len(outcome.ran) == 4
    chosen, whole = found["safe-dshb"]
    assert chosen.seeds == whole.seeds == (1, 2, 3)
    assert [*chosen.metrics["accuracy"].per_seed] == ["1", "2", "3"]
    assert chosen.settings["run.seeds"] == [1, 2, 3]
    first = {}
    for cell in sorted(path.parent for path in (tmp_path / "runs").glob("*/summary.json")):
        run = load(cell)
        if run.config.run.seeds == (1,):
            first[run.config.algorithm.options.lr] = run.summary.metrics["accuracy"].mean
    assert first[chosen.settings["algorithm.lr"]] == max(first.values())
    assert chosen.metrics["accuracy"].per_seed["1"] == max(first.values())


def test_a_comparison_and_a_page_say_where_not_all_of_a_grid_was_tried() -> None:
    """Of fifteen points one was tried, two, all; of the fourth cell it is not on record."""
    name, table = "byz-clip21-figure2", "CNN, f = 5, LF"
    points = [f"algorithm.lr={lr}, privacy.clip={clip}" for lr, clip in GRID]
    cells = [
        Measured(
            *(table, "SAFE-DSHB", f"ε = {epsilon}", {"accuracy": Spread.of({1: 0.5})}, (1,)),
            tried={point: {"1": 0.5} for point in points[:count]},
        )
        for epsilon, count in ((3, 1), (8, 2), (13, 15), (18, 0))
    ]
    results = Results(name, tuple(cells))
    said = verdict_table(name, results, Paper("a paper", ())).markdown()
    assert "2 of 4 cells: not all of the grid was tried, the best may be higher" in said
    page = pages.markdown(results, Paper("a paper", ()))
    assert "1 cell shows the one point of its grid that was tried: the best may be higher." in page
    assert "1 cell shows the best of 2 of the 15 points of its grid: the best may be higher." in page


def test_a_picture_of_half_a_study_has_room_for_the_rest_and_says_how_much_there_is() -> None:
    name, scores = "byz-clip21-figure2", {"accuracy": Spread.of({1: 0.5})}
    cells = tuple(Measured("CNN, f = 5, LF", "SAFE-DSHB", f"ε = {one}", scores, (1,)) for one in (23, 8))
    assert figures._columns(cells, name, cells[0].table) == ["ε = 3", "ε = 8", "ε = 13", "ε = 18", "ε = 23"]
    assert figures._heading(Results(name, cells)) == "byz-clip21-figure2: 2 of 90 places"
    assert figures._our_marks(Results(name, cells)) == {}
    mixed = (cells[0], replace(cells[1], seeds=(1, 2)))
    assert figures._our_marks(Results(name, mixed)) == {"x": "one seed"}


def test_a_table_that_was_not_run_keeps_its_panel_unless_only_one_was() -> None:
    name, scores = "byz-clip21-figure2", {"accuracy": Spread.of({1: 0.5})}
    tables = ("MLP, f = 5, LF", "CNN, f = 10, LF")
    cells = tuple(Measured(table, "SAFE-DSHB", "ε = 8", scores, (1,)) for table in tables)
    layout = [f"{model}, f = {f}, LF" for model in ("CNN", "MLP") for f in (1, 5, 10)]
    assert figures._panels(Results(name, cells)) == [("accuracy", table) for table in layout]
    assert figures._panels(Results(name, cells[:1])) == [("accuracy", "MLP, f = 5, LF")]


def test_a_share_is_not_drawn_where_it_cannot_be(tmp_path: Path, monkeypatch) -> None:
    """A mean of 0.1 with a spread of 0.4 has no bar far below 0."""
    limits: list[tuple[float, float]] = []

    def save(picture, path: Path) -> Path:
        limits.extend(axes.get_ylim() for axes in picture.axes)
        return path

    monkeypatch.setattr(figures, "save_picture", save)
    spread = Spread.of({1: 0.0, 2: 0.0, 3: 0.9})
    cells = (
        Measured("noise multiplier 1 (printed ε = 1.14)", "smea", "SF", {"accuracy": spread}, (1, 2, 3)),
    )
    picture_of("safe-dshb", Results("safe-dshb", cells), Paper("a paper", ()), tmp_path / "a.png")
    assert limits
    assert all(-0.05 < low <= 0 and 0.5 < high < 1.05 for low, high in limits)


def test_a_panel_over_orders_of_magnitude_keeps_its_scale() -> None:
    from matplotlib.figure import Figure

    plain, wide, empty = Figure().subplots(1, 3)
    plain.plot([0.0, 0.9])
    wide.plot([1e-4, 0.9])
    wide.set_yscale("log")
    before = wide.get_ylim()
    figures._on_one_scale([plain, wide, empty])
    assert wide.get_ylim() == before
    assert empty.get_ylim() == plain.get_ylim() != (0.0, 1.0)


def test_every_paper_has_a_file_of_its_numbers() -> None:
    for study in studies.values():
        assert paper(study.paper).reference
    with pytest.raises(KeyError, match="did you mean 'cafcor'"):
        paper("cafcr")


def test_a_study_none_of_whose_runs_gave_a_result_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to draw: no run of safe-dshb has given a result"):
        picture_of("safe-dshb", Results("safe-dshb", ()), paper("safe-dshb"), tmp_path / "a.png")


def test_a_picture_has_its_columns_in_the_order_of_the_study(tmp_path: Path, monkeypatch) -> None:
    """Though the first row has no result at ε = 8, and the file has the others in another order."""
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.set_xticks", lambda axes, ticks, labels=None, **_: drawn.append(labels)
    )
    name, table = "byz-clip21-figure2", "MLP, f = 1, LF"
    places = [("Byz-Clip21-SGD2M", 3), ("Byz-Clip21-SGD2M", 23), ("SAFE-DSHB", 23), ("SAFE-DSHB", 8)]
    cells = [Measured(table, row, f"ε = {one}", {"accuracy": Spread.of({1: 0.5})}) for row, one in places]
    picture_of(name, Results(name, tuple(cells)), Paper("a paper", ()), tmp_path / "a.png")
    assert drawn == [["ε = 3", "ε = 8", "ε = 13", "ε = 18", "ε = 23"]]


@pytest.mark.parametrize("command", ["list", "compare byz-clip21", "figure byz-clip21"])
def test_results_of_wrong_types_are_refused_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    cell = ours("ours", 0.5)
    write_results(
        Results("byz-clip21", (cell, replace(cell, row={"not": "a name"}))), tmp_path / "byz-clip21.json"
    )
    refused = CliRunner().invoke(app, ["papers", *command.split(), "--results", "."])
    assert isinstance(refused.exception, UserError)
    assert "cells.1.row" in str(refused.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["byz-clip21.json"]
