"""Studies as grids of runs: the papers' settings are in the places, names lead to them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trilemma.errors import ConfigError
from trilemma.papers import studies
from trilemma.papers.grid import Place
from trilemma.papers.published import paper


@pytest.fixture(scope="module", params=studies)
def places(request: pytest.FixtureRequest) -> Sequence[Place]:
    return studies[request.param].runs("1-2")


def test_every_place_is_taken_once_and_has_the_seeds(places: Sequence[Place]) -> None:
    assert len({(place.table, place.row, place.column) for place in places}) == len(places)
    assert all(place.config.run.seeds == (1, 2) for place in places)


def test_rows_without_liars_have_none_and_the_others_have_an_attack(places: Sequence[Place]) -> None:
    for place in places:
        assert (place.config.federation.byzantine == 0) == (place.config.attack.name == "none"), (
            place.cell.label
        )


def test_a_quick_look_is_one_seed_of_some_places() -> None:
    for name, study in studies.items():
        quick = study.runs(quick=True)
        whole = {(place.table, place.row, place.column) for place in study.runs()}
        assert 0 < len(quick) < len(whole), name
        assert {(place.table, place.row, place.column) for place in quick} < whole
        assert {place.config.run.seeds for place in quick} == {(1,)}


def test_what_is_printed_is_about_a_place_of_its_study() -> None:
    """A misspelt row or column in a file of published numbers would never be compared."""
    for name, study in studies.items():
        places = [(place.table, place.row, place.column) for place in study.runs("1")]
        for printed in paper(study.paper).of(name).printed:
            assert any(printed.stands_at(*place, printed.metric) for place in places), printed


def test_safe_dshb_crosses_noise_attacks_and_rules() -> None:
    places = studies["safe-dshb"].runs("1")
    assert len(places) == 3 * (4 * 4 + 2)
    assert {place.config.privacy.noise_multiplier for place in places} == {1, 2, 3}
    momentum = [p.config.algorithm.options.momentum for p in places if p.row == "nobody lies, DP-DSGD"]
    assert momentum == [0.0] * 3


def test_cafcor_sets_the_threat_its_row_names() -> None:
    for place in studies["cafcor-mnist"].runs("1"):
        named = "secldp" if place.row.startswith("mean") else place.row.rpartition("-")[2].lower()
        assert place.config.privacy.threat == named


def test_byz_clip21_walks_along_the_product_of_step_and_threshold() -> None:
    for place in studies["byz-clip21"].runs("1"):
        product = place.config.algorithm.options.lr * place.config.privacy.clip
        share = 0.1 if place.row.startswith("Byz-Clip21") else 1.0
        assert product == pytest.approx(share * float(place.column.removeprefix("γτ = ")))


def test_only_narrows_the_grid_and_unknown_names_are_refused() -> None:
    assert {place.row for place in studies["safe-dshb"].runs("1", only="filter")} == {"filter"}
    with pytest.raises(ConfigError, match="did you mean 'byz-clip21'"):
        studies["byz-clip"]
