"""A result read back from disk, simulated or deployed: rounds, summary, model, suspects, tables, picture."""

from __future__ import annotations

import json
import math
import shutil
import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from damage import files_up_to
from federation_harness import Direct, coordinator, make, small_config
from trilemma import config, report, simulate
from trilemma.base.errors import UserError
from trilemma.base.records import Record, Spread, Summary
from trilemma.federation.client.at_home import received
from trilemma.federation.party.layout import Party
from trilemma.report.pictures import draw
from trilemma.report.trust import outliers

BASE = {
    "federation": {"clients": 7, "byzantine": 2},
    "algorithm": {"name": "dsgd", "lr": 1.0, "batch_size": 25},
    "aggregation": {"rule": "caf"},
    "attack": {"name": "ipm", "strength": 10.0},
    "run": {"rounds": 6, "seeds": [1, 2], "evaluate_every": 3},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("result") / "run"
    settings = config.parse(BASE)
    simulate.run(settings, out)
    simulate.run(simulate.without_liars(settings), out / "baseline")
    return out


def test_a_picture_is_written_whole_or_not_at_all(run: Path, tmp_path: Path) -> None:
    with files_up_to(5000), pytest.raises(OSError, match="File too large") as told:
        report.load(run).plot(tmp_path / "curves.png")
    assert told.value.filename == str(tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong", [{"accuracy": {"mean": math.nan}}, {"epsilon": {"pld": math.nan}, "delta": 0.1}]
)
def test_a_summary_with_a_figure_that_is_no_number_is_refused(run: Path, tmp_path: Path, wrong: dict) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    plain = json.loads(path.read_text())
    for key, value in wrong.items():
        plain[key] = {**plain[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(plain))
    with pytest.raises(UserError, match=r"summary\.json.*finite number"):
        report.load(tmp_path / "run")


def test_a_simulated_run_is_read_back(run: Path) -> None:
    result = report.load(run)
    assert list(result.seeds) == [1, 2]
    assert [record.round for record in result.records] == [*range(1, 7)] * 2
    assert np.array_equal(result.params(2).numpy(), np.load(run / "seed-2" / "model.npy"))
    assert result.summary.accuracy.per_seed["2"] == pytest.approx(
        result.seeds[2][-1].metrics["accuracy"], abs=1e-6
    )
    with pytest.raises(UserError, match="no seed 3; allowed: 1, 2"):
        result.params(3)


def test_whoever_uses_a_model_is_told_what_its_clients_did_to_examples(run: Path) -> None:
    result = report.load(run)
    assert result.caveat == ""
    for key, told in (("centre", "mean of its own examples off them"), ("whiten", "by their covariance")):
        changed = replace(result, config=result.config.with_(f"data.{key}=true"))
        assert told in changed.caveat


def test_the_least_trusted_clients_come_first(run: Path) -> None:
    suspects = report.load(run).suspects()
    assert {suspect.client for suspect in suspects[:2]} == {5, 6}
    assert suspects[0].weight < 0.05 < suspects[2].weight
    assert all(suspect.heard == 12 for suspect in suspects)
    assert math.fsum(suspect.weight for suspect in suspects) == pytest.approx(1, abs=1e-4)


def test_clients_that_were_not_heard_do_not_count_as_distrusted() -> None:
    records = [
        Record(1, weights={0: 0.5, 1: 0.5}, absent=(2,)),
        Record(2, weights={0: 1.0, 2: 0.0}, rejected=((2, "not finite"), (None, "gibberish"))),
    ]
    spread = Spread.of({1: 0.5})
    summary = Summary({"accuracy": spread}, spread, {}, None, 0.0, "dsgd", "mean", 3, 1, "nan", "none", 2)
    result = report.Result(
        Path(), config.parse({}), summary, {1: records}, lambda _: torch.empty(0), lambda *_: {}
    )
    found = [(one.client, one.weight, one.heard, one.absent, one.rejected) for one in result.suspects()]
    assert found == [(2, 0.0, 1, 1, 1), (1, 0.5, 1, 0, 0), (0, 0.75, 2, 0, 0)]


def test_an_honest_client_is_named_as_seldom_as_stated() -> None:
    """Somebody always has the smallest share, and where honest clients' data differ it is always the same."""
    draw, named = np.random.default_rng(1), 0
    for _ in range(1000):
        usual = draw.normal(1 / 7, 0.02, 7)
        told = [Record(t, weights=dict(enumerate(usual + draw.normal(0, 0.03, 7)))) for t in range(1, 5)]
        named += bool(outliers(7, told, most=2))
    assert named <= 20  # `CHANCE` allows 10; more than 20 would be one in a thousand


@pytest.mark.parametrize("rule", ["caf", "mda", "nnm+cwtm"])
def test_nobody_stands_out_where_nobody_lies_and_liars_do(tmp_path: Path, rule: str) -> None:
    long = {**BASE, "aggregation": {"rule": rule}, "run": {"rounds": 40, "evaluate_every": 40}}
    simulate.run(config.parse(long), tmp_path / "lies")
    told = report.load(tmp_path / "lies").verdict_on_clients()
    assert ("nobody stands out: mda leaves" if rule == "mda" else "clients 5 (0.00") in told
    nobody = {"federation": {"clients": 7, "byzantine": 0, "tolerate": 2}, "attack": {"name": "none"}}
    for alpha in (1.0, 100.0):
        fair = {**long, **nobody, "data": {"partition": {"name": "dirichlet", "alpha": alpha}}}
        simulate.run(config.parse(fair), tmp_path / f"{alpha}")
        assert "nobody stands out: " in report.load(tmp_path / f"{alpha}").verdict_on_clients()


def test_tables_show_accuracy_beside_the_rest(run: Path) -> None:
    result = report.load(run)
    assert result.baseline is not None
    free = report.percent(result.baseline.summary.accuracy)
    *_, row, _, remark = result.markdown().splitlines()
    assert remark.startswith("clients 5 (0.000), 6 (0.000) stand out by a small share: ")
    cells = row.split(" | ")
    assert cells[:5] == ["| dsgd", "caf", "2 of 7", "ipm", "∞"]
    assert cells[6] == f"{free} |"
    for word in ("2 of 7", "ipm", "no liars %", free):
        assert word in str(result.table())


def test_a_table_keeps_brackets_stars_and_bars() -> None:
    table = report.Table("", ("[privacy]",), (("a|b *",),), ("* seed 1 diverged",), words=1)
    assert "[privacy]" in str(table)
    assert table.markdown() == "| [privacy] |\n|---|\n| a\\|b \\* |\n\n\\* seed 1 diverged"


def test_rows_are_flat_and_pandas_is_optional(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = report.load(run)
    rows = result.rows()
    assert len(rows) == 12
    assert (rows[7]["seed"], rows[7]["round"]) == (2, 2)
    assert "accuracy" not in rows[0]
    assert {"accuracy", "loss", "up_bytes", "weight_6", "seconds"} <= set(rows[2])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        result.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=lambda rows: rows))
    assert result.to_pandas() == rows


def test_the_picture_is_drawn_where_asked(run: Path, tmp_path: Path) -> None:
    result = report.load(run)
    for path in (tmp_path / "a.png", str(tmp_path / "b.png")):  # as people write it
        assert result.plot(path).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "link.png").symlink_to(tmp_path / "c.png")
    result.plot(tmp_path / "link.png")
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "c.png").is_file()
    assert result.plot(quantity="up_bytes") == run / "curves.png"
    assert result.plot(kind="suspects") == run / "suspects.png"
    assert (run / "suspects.png").stat().st_size > 5000
    with pytest.raises(UserError, match=r"unknown picture 'heat'.*cost, curves, privacy, suspects"):
        result.plot(kind="heat")
    assert list(result.curve().rounds) == [3, 6]
    assert result.curve().values.shape == (2, 2)


def test_a_run_under_way_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    directory = simulate.RunDirectory.create(tmp_path / "run", config.parse(BASE))
    for seed, rounds in ((1, 3), (2, 1)):
        folder = directory.seed(seed)
        folder.path.mkdir()
        for round_ in range(1, rounds + 1):
            folder.append(Record(round_, metrics={"accuracy": 0.1 * round_} if round_ > 1 else {}))
    result = report.load(tmp_path / "run")
    assert result.summary.accuracy.per_seed == {"1": pytest.approx(0.3), "2": None}
    assert result.summary.notes == ("not finished: 1 of 6 rounds",)
    with pytest.raises(UserError, match="not finished"):
        result.params()


def test_a_federation_is_read_from_its_servers_folder(tmp_path: Path) -> None:
    """The same class, from records the server wrote: client 2 left in the second round."""
    parties = make(tmp_path / "federation", 5, small_config(5))
    exchange = Direct(parties)
    runner, _ = coordinator(parties, exchange, "pilot")
    honest = runner.log.append

    def append(commit):
        honest(commit)
        if commit.rounds == 1:
            exchange.gone = {2}

    runner.log.append = append
    commit = runner.go()
    for folder in (tmp_path / "federation", tmp_path / "federation" / "server"):
        result = report.load(folder)
        assert torch.equal(result.params(), commit.broadcast["params"])
        assert [record.absent for record in result.records][:2] == [(), (2,)]
        assert result.summary.accuracy.mean == pytest.approx(result.records[-1].metrics["accuracy"], abs=1e-6)
        suspects = {one.client: one for one in result.suspects()}
        assert suspects[2].absent >= 1
        assert "? of 5" in str(result)
    assert report.load(tmp_path / "federation", "pilot").summary == result.summary
    with pytest.raises(UserError, match="no run 'pilt': did you mean 'pilot'"):
        report.load(tmp_path / "federation", "pilt")
    with pytest.raises(UserError, match="a client's folder"):
        report.load(tmp_path / "federation" / "client-0")


def test_a_model_is_not_read_by_another_configuration(tmp_path: Path) -> None:
    """A seed decides what a model's numbers mean; rounds that were recorded stay what they were."""
    parties = make(tmp_path / "federation", 5, small_config(5))
    coordinator(parties, Direct(parties), "pilot")[0].go()
    written = parties[0].config.read_text()
    parties[0].config.write_text(written.replace("seeds = [\n    1,\n]", "seeds = [\n    2,\n]"))
    assert parties[0].config.read_text() != written
    result = report.load(tmp_path / "federation")
    assert result.records
    with pytest.raises(UserError, match="are not those with which run 'pilot' began: put them back"):
        result.params()
    for commit in (parties[0].run_folder("pilot") / "commits").iterdir():
        commit.write_bytes(commit.read_bytes()[:100])
    with pytest.raises(UserError, match="are not those with which run 'pilot' began: put them back"):
        report.load(tmp_path / "federation").params()
    parties[0].config.write_text(written)
    assert report.load(tmp_path / "federation").state_dict(), "the model is a file of its own"


@pytest.mark.parametrize("party", ["server", "client-1"])
def test_a_model_whose_file_a_disk_broke_is_refused(tmp_path: Path, party: str) -> None:
    """One bit of a number is enough: it would be another model, and nobody would notice."""
    parties = make(tmp_path / "federation", 5, small_config(5))
    coordinator(parties, Direct(parties), "pilot")[0].go()
    path = next(one for one in parties if one.name == party).run_folder("pilot") / "result"
    content = bytearray(path.read_bytes())
    content[-9] ^= 64
    path.write_bytes(content)
    folder = tmp_path / "federation" / party
    with pytest.raises(UserError, match=r"result: not as it was written: its checksum is another"):
        report.load(folder).params() if party == "server" else received(Party.open(folder)).params


def test_a_finished_run_whose_commits_are_gone_is_not_begun_again(tmp_path: Path) -> None:
    """Under its name another model would take the place of the one that is there."""
    parties = make(tmp_path / "federation", 5, small_config(5))
    coordinator(parties, Direct(parties), "pilot")[0].go()
    folder = parties[0].run_folder("pilot")
    shutil.rmtree(folder / "commits")
    for lost in ("result", "rounds.jsonl"):  # either says that there was a run
        with pytest.raises(UserError, match=r"no commit of it is left: .* choose a new name"):
            coordinator(parties, Direct(parties), "pilot")[0].go()
        assert not (folder / "commits").exists()
        (folder / lost).unlink()
    coordinator(parties, Direct(parties), "other")[0].go()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        report.load(tmp_path)
    make(tmp_path / "federation", 3, small_config(3))
    with pytest.raises(UserError, match="has not run yet"):
        report.load(tmp_path / "federation")


def test_pictures_of_runs_are_files(run: Path, tmp_path: Path) -> None:
    result = report.load(run)
    assert (
        draw([result, result], "curves", tmp_path / "new" / "both.svg").read_text().count("caf under ipm")
        == 2
    )
    for kind in ("suspects", "cost"):
        assert draw([result], kind, tmp_path / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
        with pytest.raises(UserError, match="of one run"):
            draw([result, result], kind, tmp_path / "x.png")
    with pytest.raises(UserError, match="has no guaranteed ε to draw: nothing is clipped and noised"):
        draw([result], "privacy", tmp_path / "x.png")
    with pytest.raises(UserError, match="did you mean 'cost'"):
        draw([result], "costs", tmp_path / "x.png")
    with pytest.raises(UserError, match=r"ends in \.png or \.svg"):
        draw([result], "curves", tmp_path / "x.jpg")


def test_the_picture_of_privacy_has_the_target(tmp_path: Path) -> None:
    private = config.parse(
        BASE,
        [
            "algorithm.name=safe-dshb",
            "privacy={threat='ldp', clip=1.0, epsilon=3.0, delta=1e-4}",
            "run.rounds=2",
        ],
    )
    simulate.run(private, tmp_path / "run")
    text = draw([report.load(tmp_path / "run")], "privacy", tmp_path / "p.svg").read_text()
    assert "asked for: 3" in text
    assert "ε = 3 under ldp" in text
    assert "f = 2, attack: ipm" in text


@pytest.mark.parametrize("content", [b"", b"{", b"[]\n", b"3\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"])
@pytest.mark.parametrize("name", ["summary.json", "model.json", "seed-1/metrics.jsonl", "seed-1/model.npy"])
def test_a_file_of_a_run_that_is_damaged_is_named(
    run: Path, name: str, content: bytes, tmp_path: Path
) -> None:
    """Whoever reads runs is told which file to bring back, and gets no traceback."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / name).write_bytes(content)
    torn = name.endswith("jsonl") and b"\n" not in content  # a last line that is still being written
    with nullcontext() if torn else pytest.raises(UserError, match=Path(name).name):
        report.load(copy).state_dict(1)
