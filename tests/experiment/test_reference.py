"""The configuration reference and the listings say what the source declares, all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trilemma.cli import app
from trilemma.experiment.reference import markdown
from trilemma.experiment.rooms import described, rooms

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == markdown(), "run: make docs-reference"


@pytest.mark.parametrize("room", rooms())
def test_everything_says_what_it_is_and_what_its_options_mean(room: str) -> None:
    registry = rooms()[room]
    for name in registry:
        one = described(registry, name)
        assert one.summary, name
        assert [option.name for option in one.options if not option.description] == [], name


def _list(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["list", *arguments], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_one_thing_is_shown_with_options_ranges_defaults_and_reference() -> None:
    text = _list("dirichlet")
    for word in ("partition", "alpha", "number > 0", "required", "minimum", "whole number ≥ 1"):
        assert word in text
    text = _list("alie")
    for word in ('number, "zmax" or "search"', "search.reach", "100.0", "NeurIPS 2019"):
        assert word in text
    (found,) = json.loads(_list("bucketing", "--json"))
    assert [option["name"] for option in found["options"]] == ["size"], "f is not set by hand"


def test_a_ready_configuration_is_shown_as_it_is() -> None:
    assert "[privacy]\nthreat = " in _list("cafcor-mnist"), "tables are not read as markup"
    assert "cafcor-mnist-dirichlet-0.1" in _list("configs")


def test_square_brackets_in_a_summary_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = rooms()["attacks"]
    monkeypatch.setitem(registry._summaries, "sf", "as [privacy] says")  # type: ignore[attr-defined]
    assert "as [privacy] says" in _list("attacks")
    assert "as [privacy] says" in _list("sf")
