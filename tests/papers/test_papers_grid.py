"""Studies as grids of runs: the papers' settings are in the cells, tables put both results side by side."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from trilemma import papers, simulate
from trilemma.errors import ConfigError
from trilemma.papers import grid
from trilemma.papers.grid import Cell
from trilemma.records import Spread


@pytest.fixture(scope="module", params=papers.STUDIES)
def cells(request: pytest.FixtureRequest) -> list[Cell]:
    return papers.cells(request.param, "1-2")


def test_every_cell_runs_in_a_folder_of_its_own(cells: list[Cell]) -> None:
    assert len({cell.folder for cell in cells}) == len(cells)
    assert all(cell.config.run.seeds == (1, 2) for cell in cells)
    assert all(not part.startswith(".") for cell in cells for part in cell.folder.parts)


def test_rows_without_liars_have_none_and_the_others_have_an_attack(cells: list[Cell]) -> None:
    for cell in cells:
        assert (cell.config.federation.byzantine == 0) == (cell.config.attack.name == "none"), cell.folder


def test_safe_dshb_crosses_noise_attacks_and_rules() -> None:
    cells = papers.cells("safe-dshb", "1")
    assert len(cells) == 3 * (4 * 4 + 2)
    assert {cell.config.privacy.noise_multiplier for cell in cells} == {1, 2, 3}
    momentum = [c.config.algorithm.options.momentum for c in cells if c.row == "nobody lies, DP-DSGD"]
    assert momentum == [0.0] * 3


def test_cafcor_sets_the_threat_its_row_names() -> None:
    for cell in papers.cells("cafcor-mnist", "1"):
        named = cell.row.rpartition("-")[2].lower()
        assert cell.config.privacy.threat == ("secldp" if named == "mean" else named)


def test_byz_clip21_walks_along_the_product_of_step_and_threshold() -> None:
    for cell in papers.cells("byz-clip21", "1"):
        product = cell.config.algorithm.options.lr * cell.config.privacy.clip
        share = 0.1 if cell.row.startswith("Byz-Clip21") else 1.0
        assert product == pytest.approx(share * float(cell.column.removeprefix("γτ = ")))


def test_only_narrows_the_grid_and_unknown_names_are_refused() -> None:
    assert {cell.row for cell in papers.cells("safe-dshb", "1", "filter")} == {"filter"}
    with pytest.raises(ConfigError, match="did you mean 'byz-clip21'"):
        papers.cells("byz-clip", "1")


@pytest.mark.slow
def test_a_grid_is_run_resumed_and_laid_out(tmp_path: Path) -> None:
    """Two cells of one table: the published figure beside ours, a cell that was not run empty."""
    found = papers.cells("safe-dshb", "1", "SF")[:2]
    short = [Cell(c.table, c.row, c.column, c.config.with_("run.rounds=2"), c.published) for c in found]
    labels = []

    @contextlib.contextmanager
    def watch(label: str):
        labels.append(label)
        yield simulate.Silent()

    results = grid.run_grid(short, tmp_path, watch)
    again = grid.run_grid(short, tmp_path, watch)
    assert {c: s.accuracy for c, s in again.items()} == {c: s.accuracy for c, s in results.items()}
    assert labels[0] == f"{short[0].table}, smea, SF"
    del results[short[1]]
    ours = f"{100 * results[short[0]].accuracy.mean:.1f}"
    assert grid.markdown(short, results).splitlines() == [
        f"**{short[0].table}**",
        "",
        "|  | SF |",
        "|---|---|",
        f"| smea | {ours} (paper: ≈ 80) |",
        "| filter |  |",
    ]


def test_a_run_of_which_every_seed_diverged_is_a_star() -> None:
    from trilemma.report import percent

    assert percent(Spread.of({1: None, 2: None})) == "*"
