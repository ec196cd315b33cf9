"""What the arena lacks, and running exactly that."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from trilemma.cli.app import app
from trilemma.errors import UserError
from trilemma.papers import arena, gaps

ROW = arena.Row("phishing-7", "LDP", 3, "caf", "loss", 1, 0.8, 0, 1, 69, 1.5)


def row(**changes: object) -> arena.Row:
    return arena.Row(**{**ROW.__dict__, **changes})  # type: ignore[arg-type]


def test_what_is_missing_are_cells_that_the_strongest_liars_did_not_meet() -> None:
    everybody = [row(adversary=name, seed=seed) for name in gaps.STRONGEST for seed in (1, 2, 3)]
    lost = [row(rule="mean", accuracy=0.44)]
    some = [row(rule="cwmed", adversary="foe"), row(rule="cwmed", seed=4, adversary="errors", accuracy=0.7)]
    listed = {one[:4]: one[4:] for one in gaps.missing([*everybody, *lost, *some]).rows}
    place = ("phishing-7", "LDP", "3")
    assert (*place, "caf") not in listed, "all of them, with three seeds"
    assert (*place, "mean") not in listed, "it is lost"
    assert listed[*place, "cwmed"] == (
        "0.70",
        "stretched errors, errors, rotated slanted, rotated loss, foe (1 of 3)",
    )
    assert listed[*place, "smea"] == ("–", "anybody")
    assert not any(one[0] == "phishing-30" and one[3] == "smea" for one in listed)
    assert not any("root set" in one[3] or "alone" in one[3] for one in listed)


def test_a_file_says_what_it_lacks(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    arena.record(kept, [ROW])
    shown = CliRunner().invoke(app, ["arena", "--show", str(kept), "--missing"])
    assert "| phishing-7 | LDP | 3 | caf | 0.80 | stretched errors, errors" in shown.output
    refused = CliRunner().invoke(app, ["arena", "--missing"])
    assert isinstance(refused.exception, UserError)
