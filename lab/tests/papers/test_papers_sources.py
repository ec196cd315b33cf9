"""Which sources make results: changed files are told, others and words are not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from trilemma.base.records import Spread
from trilemma_lab.papers import studies
from trilemma_lab.studies import sources
from trilemma_lab.studies.measured import Measured, new_results, read_results, write_results
from trilemma_lab.studies.sources import changed, code_of, sources_of

PACKAGE, LAB = sources.ROOTS
SETTINGS = {"aggregation.rule": "nnm+cwmed", "attack.name": "alie", "algorithm.name": "dsgd"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(
        PACKAGE, tmp_path_factory.mktemp("copy") / "trilemma", ignore=shutil.ignore_patterns("__pycache__")
    )


def test_a_run_is_made_by_what_every_run_goes_through_and_by_what_it_names(copy: Path) -> None:
    found = sources_of([SETTINGS], root=copy)
    everybody = {
        "simulate/engine.py",
        "base/keys.py",
        "learning/steps/privatise.py",
        "data/batches/federated.py",
    }
    named = {"attacks/alie.py", "aggregation/mixing.py", "aggregation/coordinate.py", "learning/dsgd.py"}
    others = {
        "attacks/mimic.py",
        "aggregation/smea.py",
        "learning/fedavg.py",
        "trilemma_lab/studies/measured.py",
    }
    for path in everybody | named | others:
        assert (copy / path).is_file() or (LAB.parent / path).is_file()
    assert everybody | named <= found.keys()
    assert not others & found.keys()


@pytest.mark.parametrize(
    ("path", "line", "counts"),
    [
        ("aggregation/coordinate.py", "CHANGED = 1\n", True),
        ("simulate/engine.py", "CHANGED = 1\n", True),
        ("aggregation/smea.py", "CHANGED = 1\n", False),
        ("aggregation/coordinate.py", "\n# said otherwise\n", False),
        ("aggregation/coordinate.py", '"""Said otherwise."""\n', False),
    ],
)
def test_only_code_of_what_a_run_uses_counts(copy: Path, path: str, line: str, counts: bool) -> None:
    before = sources_of([SETTINGS], root=copy)
    text = (copy / path).read_text()
    (copy / path).write_text(text + line)
    try:
        after = sources_of([SETTINGS], root=copy)
    finally:
        (copy / path).write_text(text)
    assert changed(before, after) == ([path] if counts else [])
    assert (code_of(before) != code_of(after)) == counts


def test_what_is_written_while_a_process_runs_is_not_what_it_ran(copy: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "ROOTS", (copy, *sources.ROOTS[1:]))
    sources.own_tree.cache_clear()
    try:
        before = sources_of([SETTINGS])
        text = (copy / "simulate" / "engine.py").read_text()
        (copy / "simulate" / "engine.py").write_text(text + "CHANGED = 1\n")
        assert sources_of([SETTINGS]) == before
        (copy / "simulate" / "engine.py").write_text(text)
    finally:
        sources.own_tree.cache_clear()


def test_what_is_computed_is_made_by_its_module() -> None:
    assert studies["lp-proj-theory"].module == "trilemma_lab.papers.lp_proj.theory"
    found = sources_of([{"draws": 400}], studies["lp-proj-theory"].module)
    assert {"trilemma_lab/papers/lp_proj/linear.py", "base/keys.py"} <= found.keys()
    assert "simulate/engine.py" not in found
    costs = sources_of([{"rule": "smea"}], studies["cafcor-costs"].module)
    assert {"aggregation/smea.py", "aggregation/passes/gram.py"} <= costs.keys()


def test_results_tell_how_far_they_are_behind(tmp_path: Path) -> None:
    one, two = (
        Measured("t", row, "c", {"accuracy": Spread.of({1: 0.5})}, (1,), settings=SETTINGS) for row in "ab"
    )
    results = new_results("s", [one])
    assert results.staleness().words == results.staleness().brief == ""
    then = dict(results.sources[results.code])
    then["base/keys.py"], _ = "0000", then.pop("simulate/engine.py")
    older = replace(results, code=code_of(then), date="2020-01-01", sources={code_of(then): then})
    assert older.staleness().changed == ("base/keys.py", "simulate/engine.py")
    both = older.merged([two])
    assert [cell.code for cell in both.cells] == [code_of(then), ""]
    write_results(both, tmp_path / "s.json")
    assert read_results(tmp_path / "s.json") == both
    assert both.staleness().words == "2 sources have changed since: base/keys.py, simulate/engine.py"
    assert both.merged([one]).staleness().words == ""
    assert both.merged([one]).sources.keys() == results.sources.keys()
    unknown = replace(results, code="", sources={})
    assert unknown.staleness().words == "1 of 1 cells are by code that is not known"
    assert unknown.staleness().brief == "of earlier code"


def test_another_rule_on_the_same_day_makes_nothing_older() -> None:
    first = new_results("s", [Measured("t", "a", "c", {}, settings={"aggregation.rule": "caf"})])
    more = first.merged([Measured("t", "b", "c", {}, settings={"aggregation.rule": "smea"})])
    assert [cell.of for cell in more.cells] == ["", ""]
    assert "aggregation/smea.py" in more.sources[more.code]
    assert more.staleness().words == ""
