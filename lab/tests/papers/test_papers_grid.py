"""Studies as grids of runs: the papers' settings are in the places, names lead to them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trilemma.base.errors import ConfigError
from trilemma_lab.papers import studies
from trilemma_lab.papers.published import paper
from trilemma_lab.studies.grid import Place

RUN = [name for name, study in studies.items() if study.compute is None]
"""The studies that have runs."""


@pytest.fixture(scope="module", params=RUN)
def places(request: pytest.FixtureRequest) -> Sequence[Place]:
    return studies[request.param].runs("1-2")


def test_every_run_stands_at_a_place_once_and_has_the_seeds(places: Sequence[Place]) -> None:
    assert len({(place.at, place.cell.name) for place in places}) == len(places)
    assert all(place.config.run.seeds == (1, 2) for place in places)


def test_rows_without_liars_have_none_and_the_others_have_an_attack(places: Sequence[Place]) -> None:
    for place in places:
        lies = (
            place.config.attack.name != "none" or place.config.algorithm.name == "local"
        )  # which hears none
        assert place.config.federation.byzantine == 0 or lies, place.cell.label
        assert place.config.attack.name == "none" or place.config.federation.byzantine, place.cell.label


def test_a_quick_look_is_one_seed_of_some_places() -> None:
    for name in RUN:
        study = studies[name]
        quick = study.runs(quick=True)
        whole = {place.at for place in study.runs()}
        assert 0 < len(quick) < len(whole), name
        assert {place.at for place in quick} < whole
        assert study.left_out
        assert {place.config.run.seeds for place in quick} == {(1,)}


def test_what_is_printed_is_about_a_place_of_its_study() -> None:
    """A misspelt row or column in a file of published numbers would never be compared."""
    names: dict[str, tuple[set[str], ...]] = {}
    for name in RUN:
        found = names.setdefault(studies[name].paper, (set(), set(), set()))
        for place in studies[name].grid:
            for known, one in zip(found, place.at, strict=True):
                known.add(one)
    for name in RUN:
        study = studies[name]
        tables, rows, columns = names[study.paper]
        places = [*study.order]
        said = paper(study.paper).of(name)
        for printed in said.printed:
            assert any(printed.stands_at(*place, printed.metric) for place in places), printed
        for claim in (*said.claims, *said.findings):
            assert any(claim.about(*place) for place in places), claim
            assert {*claim.others} <= rows, claim
            assert {*claim.tables, claim.there.get("table", next(iter(tables)))} <= tables, claim
            assert {*claim.columns, claim.there.get("column", next(iter(columns)))} <= columns, claim


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


def test_cafcor_has_both_numbers_of_liars_and_its_baselines_have_none() -> None:
    for name, budgets in (("mnist", (27.8, 26.4)), ("fashion", (39.6, 39.6))):
        places = studies[f"cafcor-{name}"].runs("1")
        liars = {(p.config.federation.byzantine, p.config.privacy.epsilon) for p in places}
        assert liars == {*zip((5, 10), budgets, strict=True), *((0, budget) for budget in budgets)}


def test_rules_on_uneven_data_hear_ten_honest_clients() -> None:
    for name in ("mnist", "fashion"):
        for place in studies[f"cafcor-rules-{name}"].runs("1"):
            federation = place.config.federation
            assert federation.clients - federation.byzantine == 10
            assert f"f = {federation.byzantine} " in place.table or place.column == "no attack"
            assert place.config.privacy.noise_multiplier == 0.5


def test_the_figures_of_byz_clip21_try_the_same_grid_for_every_algorithm() -> None:
    for name, points in (
        ("byz-clip21-figure1", 15),
        ("byz-clip21-figure2", 15),
        ("byz-clip21-figureF1", 20),
    ):
        places = studies[name].grid
        tried: dict[str, set[tuple[float, float | None]]] = {}
        for place in places:
            said = place.config
            tried.setdefault(place.row, set()).add((said.algorithm.options.lr, said.privacy.clip))
        assert len(tried) == 3
        assert len({frozenset(grid) for grid in tried.values()}) == 1
        assert len(places) == points * len({place.at for place in places})
        for place in places:
            assert f"f = {place.config.federation.byzantine}," in place.table
            clients = place.config.federation.clients
            assert clients == (20 + place.config.federation.byzantine if "IPM" in place.table else 25)


def test_terms_vary_one_thing_at_a_time() -> None:
    """Within a row of a table the configurations differ in one of noise, liars and examples alone."""
    noise, liars = {"noise_multiplier", "threat", "delta"}, {"federation", "attack"}
    varied = {"privacy": noise, "liars": liars, "examples": {"data"}}
    rows: dict[tuple[str, str], list[Place]] = {}
    for place in studies["safe-dshb-terms"].runs("1"):
        rows.setdefault((place.table, place.row), []).append(place)
    for (table, _), places in rows.items():
        told = [place.config.dump() for place in places]
        differing = {
            key if section == "privacy" else section
            for one in told
            for section, values in one.items()
            for key, value in (values.items() if isinstance(values, dict) else [(section, values)])
            if (told[0][section].get(key) if isinstance(values, dict) else told[0][section]) != value
        }
        assert differing <= varied[table.partition(":")[0]], table
