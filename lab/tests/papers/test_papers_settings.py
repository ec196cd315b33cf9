"""What the papers say of their experiments, word by word, and what our studies run."""

from __future__ import annotations

import pytest

from trilemma_lab.papers import studies
from trilemma_lab.papers.published import paper


@pytest.mark.parametrize("name", [name for name in studies if paper(studies[name].paper).of(name).settings])
def test_every_stated_setting_is_that_of_the_runs(name: str) -> None:
    """The values of a key over all places that a sentence is about are those it names, no more, no less."""
    wrong = []
    for one in paper(studies[name].paper).of(name).settings:
        found = {
            place.settings.get(one.key) for place in studies[name].grid if one.about(place.table, place.row)
        }
        if found != set(one.values):
            wrong.append(f"{one.text}: {one.said}, and the runs have {found}")
    assert not wrong


def test_every_study_of_runs_says_what_its_settings_come_from() -> None:
    """But for ours: the older comparison of noise laws, the terms of a bound, one more reading."""
    ours = {"byz-clip21", "safe-dshb-terms", "cafcor-fashion-both", "safe-dshb-signs", "short-clip"}
    bare = {
        name
        for name, study in studies.items()
        if study.compute is None and not paper(study.paper).of(name).settings
    }
    assert bare == ours


@pytest.mark.parametrize("name", [name for name in studies if name.startswith("lp-proj-")])
def test_methods_of_a_table_run_for_equal_times(name: str) -> None:
    """Within a column of a table: who ran longer would be ahead by that alone."""
    rounds: dict[tuple[str, str], set[int]] = {}
    for place in studies[name].grid:
        rounds.setdefault((place.table, place.column), set()).add(place.config.run.rounds)
    assert [where for where, found in rounds.items() if len(found) > 1] == []


def test_searched_strengths_are_those_of_the_kept_results() -> None:
    """A default that moves must not make another experiment of a paper's: the search stands in the study."""
    for name in ("safe-dshb", "safe-dshb-main", "safe-dshb-terms", "cafcor-mnist", "cafcor-rules-fashion"):
        searched = [
            one.settings for one in studies[name].grid if one.settings.get("attack.strength") == "search"
        ]
        assert searched
        assert {one["attack.search.sides"] for one in searched} == {"positive"}, name
