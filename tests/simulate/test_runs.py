"""Runs on disk: same seed, same bytes; resumed, killed and interrupted runs end at the same model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from slow_attack import SECONDS, slow_attack

from damage import files_up_to
from trilemma import config, simulate
from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.simulate import engine, runner
from trilemma.simulate.directory import SeedDirectory
from trilemma.simulate.engine import Progress

BASE = {
    "federation": {"clients": 7, "byzantine": 3},
    "algorithm": {"name": "dsgd", "lr": 1.0, "momentum": 0.9, "batch_size": 25},
    "aggregation": {"rule": "cwmed"},
    "attack": {"name": "sf"},
    "run": {"rounds": 12, "checkpoint_every": 5, "evaluate_every": 4},
}


def model_bytes(path: Path, seed: int = 1) -> bytes:
    return (path / f"seed-{seed}" / "model.npy").read_bytes()


def metrics(path: Path, seed: int = 1) -> list[dict]:
    """Records without the seconds, which are the only thing that may differ."""
    lines = (path / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def test_same_seed_same_bytes_and_other_seed_other_bytes(tmp_path: Path) -> None:
    settings = config.parse(BASE, ["run.seeds=[1,2]"])
    simulate.run(settings, tmp_path / "a")
    simulate.run(settings, tmp_path / "b")
    assert model_bytes(tmp_path / "a") == model_bytes(tmp_path / "b")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert model_bytes(tmp_path / "a", 1) != model_bytes(tmp_path / "a", 2)


def test_a_record_says_what_happened(tmp_path: Path) -> None:
    simulate.run(config.parse(BASE), tmp_path / "run")
    records = metrics(tmp_path / "run")
    assert [record["round"] for record in records] == list(range(1, 13))
    assert len(records[0]["weights"]) == 7
    assert sum(records[0]["weights"].values()) == pytest.approx(1, abs=1e-4)
    assert records[0]["metrics"] == {}
    assert 0 <= records[3]["metrics"]["accuracy"] <= 1
    assert records[3]["epsilon"] is None
    seconds = json.loads((tmp_path / "run/seed-1/metrics.jsonl").read_text().splitlines()[3])["seconds"]
    assert set(seconds) == {"clients", "attack", "server", "evaluate"}


class StopAfter:
    """An observer that interrupts like Ctrl-C."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        self.first_round = first_round

    def round_finished(self, record: simulate.Record) -> None:
        if record.round == self.rounds:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [1, 5, 7])
def test_interrupted_run_resumes_to_the_same_model(tmp_path: Path, stop: int) -> None:
    settings = config.parse(BASE)
    simulate.run(settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        simulate.run(settings, tmp_path / "cut", StopAfter(stop))
    observer = StopAfter(-1)
    simulate.resume(tmp_path / "cut", observer)
    assert observer.first_round == stop, "Ctrl-C saves the rounds that are finished"
    assert model_bytes(tmp_path / "cut") == model_bytes(tmp_path / "whole")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("model.name=mlp", "broadcast: params is torch.float32"),
        ("federation.clients=8", "clients: it has 4, and there are 5"),
        ("run.rounds=4", "it is of round 5, and there are 4"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_nothing_is_changed(
    tmp_path: Path, change: str, complaint: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate.run(config.parse(BASE), tmp_path / "one", StopAfter(5))
    with pytest.raises(KeyboardInterrupt):
        simulate.run(config.parse(BASE, [change]), tmp_path / "other", StopAfter(3))
    checkpoint = (tmp_path / "one" / "seed-1" / "checkpoint.pt").read_bytes()
    (tmp_path / "other" / "seed-1" / "checkpoint.pt").write_bytes(checkpoint)
    before = metrics(tmp_path / "other")
    with pytest.raises(
        UserError, match=rf"'checkpoint.pt' cannot be read as a checkpoint of this run.*{complaint}"
    ):
        simulate.resume(tmp_path / "other")
    assert metrics(tmp_path / "other") == before


@pytest.mark.slow
@pytest.mark.usefixtures("plugins_forgotten", "locks_waited_for")
def test_killed_run_resumes_to_the_same_model(tmp_path: Path) -> None:
    """kill -9 in the middle, a torn last line included."""
    changes = ["run.rounds=100", "run.checkpoint_every=7", "run.evaluate_every=50", "attack={name='slow'}"]
    settings = config.parse({**BASE, "plugins": [slow_attack(tmp_path)]}, changes)
    simulate.run(settings, tmp_path / "whole")
    arguments = [sys.executable, "-m", "trilemma", "run", "--json", "--out", str(tmp_path / "cut")]
    (tmp_path / "config.toml").write_text(settings.toml())
    process = subprocess.Popen(
        [*arguments, str(tmp_path / "config.toml")],
        stdout=subprocess.DEVNULL,
        env={**os.environ, SECONDS: "0.2"},
    )
    target = tmp_path / "cut/seed-1/metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (target.exists() and len(target.read_text().splitlines()) > 9):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=120)
    assert not (tmp_path / "cut/seed-1/model.npy").exists(), "it was killed in the middle"
    assert (tmp_path / "cut/seed-1/checkpoint.pt").exists()
    with target.open("a") as file:
        file.write('{"round": 99999, "tor')
    simulate.resume(tmp_path / "cut")
    assert model_bytes(tmp_path / "cut") == model_bytes(tmp_path / "whole")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot make the directory"):
        simulate.run(config.parse(BASE), tmp_path / "file" / "run")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("old", "new"), [("noise_multiplier = 1.0", "noise_multiplier = 50.0"), ("rounds = 12", "rounds = 13")]
)
def test_a_run_is_not_continued_by_another_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, finished: bool
) -> None:
    """Its summary would say the ε of noise that most of its rounds did not have."""
    private = ["privacy.threat=ldp", "privacy.clip=1", "privacy.noise_multiplier=1", "run.device=cpu"]
    if not finished:
        monkeypatch.setattr(SeedDirectory, "finish", lambda *_: signal.raise_signal(signal.SIGINT))
    with nullcontext() if finished else pytest.raises(KeyboardInterrupt):
        simulate.run(config.parse(BASE, private), tmp_path / "run")
    monkeypatch.undo()
    path = tmp_path / "run" / "config.toml"
    was = path.read_text()
    assert old in was
    path.write_text(was.replace(old, new))
    with pytest.raises(UserError, match="was changed since this run began; put it back"):
        simulate.resume(tmp_path / "run")
    path.write_text(was.replace('device = "cpu"', 'device = "auto"').replace("= 5", "= 3"))
    assert simulate.resume(tmp_path / "run").epsilon["exact"] == pytest.approx(20.125, abs=1e-3)


@pytest.mark.parametrize("when", ["before it is scored", "after it is written"])
@pytest.mark.parametrize("last", [False, True])
def test_a_round_whose_record_an_interrupt_meets_is_written_down_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, last: bool
) -> None:
    """What is scored in the last round is what tables show."""
    settings = config.parse(BASE)
    simulate.run(settings, tmp_path / "whole")
    score, write = runner._evaluated, SeedDirectory.append
    met = 12 if last else 8

    def scored(experiment, progress, record) -> Record:
        if record.round == met and when.startswith("before"):
            monkeypatch.setattr(runner, "_evaluated", score)
            raise KeyboardInterrupt
        return score(experiment, progress, record)

    def written(folder, record) -> None:
        write(folder, record)
        if record.round == met and when.startswith("after"):
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_evaluated", scored)
    monkeypatch.setattr(SeedDirectory, "append", written)
    with pytest.raises(KeyboardInterrupt):
        simulate.run(settings, tmp_path / "stopped")
    assert SeedDirectory(tmp_path / "stopped/seed-1").checkpoint(torch.device("cpu")).round == met
    simulate.resume(tmp_path / "stopped")
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert model_bytes(tmp_path / "stopped") == model_bytes(tmp_path / "whole")


def test_a_checkpoint_whose_rounds_are_not_all_on_record_is_refused(tmp_path: Path, monkeypatch) -> None:
    """As a machine leaves it that lost its power, or an editor: a curve with a gap says nothing of it."""
    settings = config.parse(BASE)
    simulate.run(settings, tmp_path / "whole")
    monkeypatch.setattr(SeedDirectory, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        simulate.run(settings, tmp_path / "run")
    monkeypatch.undo()
    seed = SeedDirectory(tmp_path / "run/seed-1")
    lines = seed.metrics_path.read_text().splitlines(keepends=True)
    seed.metrics_path.write_text("".join(lines[:3] + lines[4:]))
    with pytest.raises(UserError, match=r"lacks records of the 10 rounds .* remove checkpoint\.pt"):
        simulate.resume(tmp_path / "run")
    seed.checkpoint_path.unlink()
    simulate.resume(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_half_a_checkpoint_of_a_killed_process_does_not_stay(tmp_path: Path, monkeypatch) -> None:
    """It may be as large as a disk's last gigabytes."""
    monkeypatch.setattr(SeedDirectory, "finish", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        simulate.run(config.parse(BASE), tmp_path / "run")
    monkeypatch.undo()
    (tmp_path / "run/seed-1/checkpoint.pt.tmp").write_bytes(b"half")
    simulate.resume(tmp_path / "run")
    assert sorted(one.name for one in (tmp_path / "run/seed-1").iterdir()) == ["metrics.jsonl", "model.npy"]


@pytest.mark.parametrize(
    ("size", "named"), [(300, "config.toml"), (1000, "seed-1/metrics.jsonl"), (3000, "seed-1/checkpoint.pt")]
)
def test_a_full_disk_is_told_in_the_systems_words_with_the_file(
    tmp_path: Path, size: int, named: str
) -> None:
    """Torch has words of its own for it, which name neither; what is half written goes."""
    with files_up_to(size), pytest.raises(OSError, match="File too large") as told:
        simulate.run(config.parse(BASE, ["run.checkpoint_every=4"]), tmp_path / "run")
    assert told.value.filename == str(tmp_path / "run" / named)
    assert not list(tmp_path.rglob("*.tmp"))
    if named == "config.toml":
        assert not (tmp_path / "run").exists()
    else:
        simulate.resume(tmp_path / "run")
        simulate.run(config.parse(BASE), tmp_path / "whole")
        assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "whole")


def test_a_mistake_found_in_the_first_round_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One found later does: rounds that were run are kept."""
    settings = config.parse(BASE)
    kept, wrong = engine.step, 0

    def step(experiment: simulate.Experiment, progress: Progress) -> object:
        if progress.round == wrong:
            raise UserError("bad setting")
        return kept(experiment, progress)

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(UserError, match="bad setting"):
        simulate.run(settings, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    wrong = 3
    with pytest.raises(UserError, match="bad setting"):
        simulate.run(settings, tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == 3


def test_a_setting_that_only_a_later_seed_refuses_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = runner.assemble

    def assemble(settings: config.Config, seed: int, *more: object) -> simulate.Experiment:
        if seed == 2:
            raise UserError("the poorest client of seed 2 is too poor")
        return kept(settings, seed, *more)

    monkeypatch.setattr(runner, "assemble", assemble)
    with pytest.raises(UserError, match="too poor"):
        simulate.run(config.parse(BASE, ["run.seeds=[1,2]"]), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_take_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless told how often, a run saves so rarely that slow saving does not matter."""
    saved = []
    kept = SeedDirectory.save

    def slow(self: SeedDirectory, progress: Progress) -> None:
        saved.append(progress.round)
        time.sleep(0.5)
        kept(self, progress)

    monkeypatch.setattr(SeedDirectory, "save", slow)
    own_pace = {**BASE, "run": {"rounds": 12}}
    simulate.run(config.parse(own_pace), tmp_path / "run")
    assert saved == [1], "after the first round, to learn what it costs"


def test_a_finished_seed_leaves_no_checkpoint_and_is_summed_up_from_its_model(tmp_path: Path) -> None:
    settings = config.parse(BASE)
    summary = simulate.run(settings, tmp_path / "run")
    assert not (tmp_path / "run/seed-1/checkpoint.pt").exists()
    records = metrics(tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    assert simulate.resume(tmp_path / "run") == summary
    assert metrics(tmp_path / "run") == records


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="already holds something"):
        simulate.run(config.parse(BASE), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
    with pytest.raises(UserError, match="not a run directory"):
        simulate.resume(tmp_path)


@pytest.mark.usefixtures("refused_at_once")
def test_two_processes_do_not_work_on_one_run(tmp_path: Path) -> None:
    settings = config.parse(BASE)
    simulate.run(settings, tmp_path / "run")
    with (
        simulate.RunDirectory.open(tmp_path / "run").locked(),
        pytest.raises(UserError, match="another process"),
    ):
        simulate.resume(tmp_path / "run")


def test_the_resolved_config_runs_again_to_the_same_model(tmp_path: Path) -> None:
    simulate.run(config.parse(BASE), tmp_path / "a")
    simulate.run(config.load(tmp_path / "a/config.toml"), tmp_path / "b")
    assert model_bytes(tmp_path / "a") == model_bytes(tmp_path / "b")


def test_divergence_is_a_star_with_the_round(tmp_path: Path) -> None:
    settings = config.parse(
        BASE,
        ["algorithm.lr=1e38", "aggregation.rule=mean", "algorithm.weight_decay=1.0", "federation.tolerate=0"],
    )
    summary = simulate.run(settings, tmp_path / "run")
    assert summary.accuracy.mean is None
    assert 1 <= summary.diverged["1"] <= 12


@pytest.mark.parametrize("returned", ["last", "sampled", "average"])
def test_returned_model(tmp_path: Path, returned: str) -> None:
    settings = config.parse(BASE, [f"run.returned={returned}"])
    experiment = simulate.assemble(settings, 1)
    progress = simulate.start(experiment)
    iterates = []
    for _ in range(12):
        progress, _ = simulate.step(experiment, progress)
        iterates.append(progress.broadcast["params"])
    match returned:
        case "last":
            assert progress.chosen.equal(iterates[-1])
        case "sampled":
            assert any(progress.chosen.equal(iterate) for iterate in iterates)
        case "average":
            mean = sum(iterates) / len(iterates)
            assert (progress.chosen - mean).abs().max() < 1e-5
