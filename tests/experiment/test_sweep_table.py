"""`[sweep]`: which runs it says, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from trilemma import config
from trilemma.base.errors import ConfigError
from trilemma.experiment.sweep import Sweep, sweep, value_at

RULES = {"aggregation.rule": ["mean", "caf"]}


def said(grid: Sweep, *paths: str) -> list[tuple]:
    return [tuple(value_at(cell.config, path) for path in paths) for cell in grid.cells]


def test_every_value_meets_every_other_and_seeds_are_every_cells() -> None:
    grid = sweep({"sweep": {"seeds": "1-3", "federation": {"byzantine": [1, 2]}, **RULES}})
    assert said(grid, "federation.byzantine", "aggregation.rule") == [
        (1, "mean"),
        (1, "caf"),
        (2, "mean"),
        (2, "caf"),
    ]
    assert {cell.config.run.seeds for cell in grid.cells} == {(1, 2, 3)}
    assert [cell.rounds for cell in grid.cells] == [300] * 4


def test_keys_that_go_together_do() -> None:
    axes = {"federation.byzantine": [1, 2], "run.rounds": [5, 7], **RULES}
    grid = sweep({"sweep": {**axes, "zip": [["federation.byzantine", "run.rounds"]]}})
    assert said(grid, "federation.byzantine", "run.rounds", "aggregation.rule") == [
        (1, 5, "mean"),
        (1, 5, "caf"),
        (2, 7, "mean"),
        (2, 7, "caf"),
    ]
    assert said(sweep({"sweep": {**axes, "zip": True}}), "run.rounds", "aggregation.rule") == [
        (5, "mean"),
        (7, "caf"),
    ]


def test_a_name_is_the_configurations_alone() -> None:
    """However a run is written, and whatever stands beside it in the grid; a task's edition counts."""
    one = sweep({"sweep": {"attack.name": ["sf", "lf"], "federation.byzantine": [2]}}).cells[0]
    same = sweep({"federation": {"byzantine": 2}, "sweep": {"attack": [{"name": "sf"}]}}).cells[0]
    assert one.name == same.name
    assert one.name != sweep({"attack": {"name": "sf"}, "federation": {"byzantine": 1}}).cells[0].name
    assert one.name != config.Cell({}, one.config, "another task").name


def test_equal_runs_are_one_cell_and_assignments_reach_all() -> None:
    """sf has no strength: its two cells are one."""
    raw = {"attack": {"name": "alie"}, "federation": {"byzantine": 2}}
    grid = sweep(
        {**raw, "sweep": {"attack.strength": [1.0, 2.0], "attack": ["sf", {"name": "alie"}]}},
        ["run.rounds=9"],
    )
    assert said(grid, "attack.name", "run.rounds") == [("sf", 9), ("alie", 9)]
    assert any("the same run as" in note for note in grid.notes)


def test_a_combination_that_cannot_be_is_refused_alone() -> None:
    grid = sweep({"sweep": {"federation.clients": [4, 9], "federation.byzantine": [1, 4]}})
    assert said(grid, "federation.clients", "federation.byzantine") == [(4, 1), (9, 1), (9, 4)]
    ((values, reason),) = grid.refused
    assert values == {"federation.clients": 4, "federation.byzantine": 4}
    assert "leaves nobody to learn for" in reason


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"aggregation.rule": "caf"}, "allowed is a list"),
        ({"aggregation.rule": []}, "at least one value"),
        ({"agregation.rule": ["caf"]}, "did you mean 'aggregation'"),
        ({**RULES, "zip": "all"}, "allowed are true and lists of keys"),
        ({**RULES, "zip": [["aggregation.rul"]]}, "did you mean 'aggregation.rule'"),
        ({**RULES, "zip": [["aggregation.rule"], ["aggregation.rule"]]}, "twice"),
        ({**RULES, "run.rounds": [1, 2, 3], "zip": True}, "aggregation.rule has 2, run.rounds has 3"),
        ({**RULES, "seeds": "x"}, "cannot read seeds"),
        ({**RULES, "aggregation": {"rule": ["krum"]}}, "aggregation.rule is said twice"),
        ({"attack": ["sf", "lf"], "attack.name": ["foe"]}, "attack and attack.name both say"),
        ({"attack": [{"name": "alie", "strength": 1.5}], "attack.strength": [1.0]}, "both say"),
        ({"seeds": "1-2", "run.seeds": [[3], [4]]}, "say the same"),
    ],
)
def test_mistakes_are_named(table: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep({"sweep": table})


def test_only_keeps_cells_by_any_key_of_their_configuration() -> None:
    grid = sweep({"sweep": {"attack": ["sf", "lf", "ipm"], "federation.byzantine": [2], **RULES}})
    kept = grid.only(["attack.name=sf", "attack.name=lf", "aggregation.rule=caf"])
    assert said(kept, "attack.name", "aggregation.rule") == [("sf", "caf"), ("lf", "caf")]
    with pytest.raises(ConfigError, match=r"aggregation\.rule: mean, caf"):
        grid.only(["aggregation.rule=krum"])


def test_a_file_with_a_sweep_is_not_run_as_one_run(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[sweep]\nseeds = "1-2"\naggregation.rule = ["mean", "caf"]\n')
    assert len(config.load_sweep(path).cells) == 2
    assert len(config.load_sweep("cafcor-mnist").cells) == 1
    with pytest.raises(ConfigError, match="use trilemma sweep FILE"):
        config.load(path)


def test_more_cells_than_anybody_runs_are_refused_before_they_are_made():
    many = list(range(1, 1000))
    with pytest.raises(ConfigError, match="997,002,999 cells"):
        sweep({"sweep": {"run.rounds": many, "algorithm.lr": many, "algorithm.momentum": many}})
