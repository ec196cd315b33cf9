"""Sweeps: what is finished is not run again, what was killed continues, no failure spreads."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from slow_attack import SECONDS, slow_attack

from trilemma import config, simulate
from trilemma.base import files
from trilemma.base.errors import ConfigError, UserError
from trilemma.experiment.sweep import sweep
from trilemma.simulate import sweep as sweeps
from trilemma.simulate.sweep import grid as on_disk
from trilemma.simulate.sweep.work import _of_shapes, _shapes, work

BASE = {
    "federation": {"clients": 7, "byzantine": 2},
    "attack": {"name": "sf"},
    "run": {"rounds": 3},
    "sweep": {"aggregation.rule": ["mean", "cwmed"], "seeds": [1, 2]},
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run cells in this process; their labels are listed."""
    labels: list[str] = []

    def run(jobs, at_once, watcher) -> None:
        for job in jobs:
            labels.append(job.label)
            watcher.started(job, 0)
            watcher.ended(job, work(job, partial(watcher.moved, job)))

    monkeypatch.setattr(on_disk, "run_jobs", run)
    return labels


def models(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("*/seed-*/model.npy"))}


def records(out: Path) -> dict[str, list[dict]]:
    """All records without the seconds, which are the only thing that may differ."""
    return {
        str(path.relative_to(out)): [
            {k: v for k, v in json.loads(line).items() if k != "seconds"}
            for line in path.read_text().splitlines()
        ]
        for path in sorted(out.glob("*/seed-*/metrics.jsonl"))
    }


def test_cells_are_run_once(tmp_path: Path, here: list[str]) -> None:
    grid = sweep(BASE)
    first = simulate.run_cells(grid.cells, tmp_path / "out")
    assert len(first.ran) == 2
    longer = sweep({**BASE, "sweep": {**BASE["sweep"], "aggregation.rule": ["cwmed", "caf"]}})
    again = simulate.run_cells(longer.cells, tmp_path / "out")
    assert here == ["mean", "cwmed", "caf"]
    assert (len(again.ran), len(again.before)) == (1, 1)
    assert len(sweeps.known_cells(tmp_path / "out")) == 3, "what was asked for before is not forgotten"
    alone = simulate.run(grid.cells[0].config, tmp_path / "alone")
    summary = json.loads((tmp_path / "out" / grid.cells[0].name / "summary.json").read_text())
    assert summary["accuracy"]["per_seed"] == alone.accuracy.per_seed


def test_a_failed_cell_is_written_down_and_tried_again(tmp_path: Path, here: list[str]) -> None:
    """A batch that no client can fill is found out only when the data are there."""
    grid = sweep({**BASE, "sweep": {"algorithm.batch_size": [9000, 25]}})
    outcome = simulate.run_cells(grid.cells, tmp_path / "out")
    ((name, failure),) = outcome.failed.items()
    assert (name, len(outcome.ran)) == (grid.cells[0].name, 1)
    assert "9000" in failure.reason
    assert sweeps.failures(tmp_path / "out") == outcome.failed
    simulate.run_cells(grid.cells, tmp_path / "out")
    assert here == ["9000", "25", "9000"]


def test_a_defect_is_recorded_with_its_place(tmp_path: Path, here: list[str], monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as change:
        change.setattr("trilemma.simulate.sweep.work.run_or_resume", broken)
        outcome = simulate.run_cells(sweep(BASE).cells, tmp_path / "out")
    failure = next(iter(outcome.failed.values()))
    assert failure.reason == "ZeroDivisionError: a defect"
    assert "in broken" in failure.trace
    mended = simulate.run_cells(sweep(BASE).cells, tmp_path / "out")
    assert len(mended.ran) == 2
    assert sweeps.failures(tmp_path / "out") == {}


def test_a_cell_killed_before_it_began_begins_again(tmp_path: Path, here: list[str]) -> None:
    grid = sweep(BASE)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep.json").write_text('{"cells": {}}')
    (tmp_path / "out" / grid.cells[0].name / "task").mkdir(parents=True)
    assert not simulate.run_cells(grid.cells, tmp_path / "out").failed


def test_a_sweep_killed_before_it_began_begins_again(tmp_path: Path, here: list[str]) -> None:
    """What a crash or a full disk leaves of its first file is no reason to refuse the folder."""
    (tmp_path / "out").mkdir()
    for name in ("sweep.json.tmp", ".lock"):
        (tmp_path / "out" / name).touch()
    assert len(simulate.run_cells(sweep(BASE).cells, tmp_path / "out").ran) == 2


def test_where_not_even_a_failure_can_be_written_down_the_others_are_run(
    tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_atomically

    def full(path: Path, *content: bytes) -> None:
        if path.parent.name == "failed":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, *content)

    monkeypatch.setattr(files, "write_atomically", full)
    grid = sweep({**BASE, "sweep": {"algorithm.batch_size": [9000, 25]}})
    outcome = simulate.run_cells(grid.cells, tmp_path / "out")
    assert [*outcome.failed, *outcome.ran] == [cell.name for cell in grid.cells]


def test_a_sweep_that_begins_beside_another_forgets_none_of_its_cells(
    tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find an empty folder; the second writes its list when the first has written its own."""
    first, second = sweep(BASE).cells
    known, write = {second.name}, on_disk._write
    monkeypatch.setattr(files, "PATIENCE", 0.01)

    def late(out: Path, cells: Mapping[str, object]) -> None:
        monkeypatch.setattr(on_disk, "_write", write)
        with suppress(UserError):  # the second is sweeping there
            known.update(simulate.run_cells([first], out).ran)
        write(out, cells)

    monkeypatch.setattr(on_disk, "_write", late)
    simulate.run_cells([second], tmp_path / "out")
    assert {*sweeps.known_cells(tmp_path / "out")} == known


def test_finished_cells_of_a_gpu_are_read_on_a_machine_without_one(tmp_path: Path, monkeypatch) -> None:
    """Those that are not finished are refused before anything is written."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cells, out = sweep({**BASE, "run": {"rounds": 3, "device": "cuda"}}).cells, tmp_path / "out"
    with pytest.raises(ConfigError, match="no CUDA device"):
        simulate.run_cells(cells, out)
    assert not out.exists()
    for cell in cells:
        (out / cell.name).mkdir(parents=True)
        (out / cell.name / "summary.json").write_text("{}")
    (out / "sweep.json").write_text('{"cells": {}}')
    assert simulate.run_cells(cells, out).before == tuple(cell.name for cell in cells)


def test_places_and_numbers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    cells = sweep(BASE).cells
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match="holds something that is not a sweep"):
        simulate.run_cells(cells, tmp_path)
    with pytest.raises(ConfigError, match="at least 1"):
        simulate.run_cells(cells, tmp_path / "out", jobs=0)
    with pytest.raises(UserError, match=r"has no sweep\.json"):
        sweeps.known_cells(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_process_reads_a_data_set_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds and runs share it while it is the same; a random split and a changed file are read anew."""
    import numpy as np

    from trilemma.base.keys import Key
    from trilemma.data import loaded
    from trilemma.data.sets import images, phishing
    from trilemma.data.storage import Storage

    reads: list[Path] = []
    read = phishing.read_npz

    def counted(path: Path, names=None):
        reads.append(path)
        return read(path, names)

    monkeypatch.setattr(phishing, "read_npz", counted)
    monkeypatch.setattr(images, "read_npz", counted)
    storage = Storage(tmp_path, tmp_path, download=False)
    fixed, drawn = phishing.Phishing(split="all"), phishing.Phishing(split="random")
    assert loaded(fixed, Key(1), storage) is loaded(fixed, Key(2), storage)
    assert len(reads) == 1
    assert not loaded(drawn, Key(1), storage).x_test.equal(loaded(drawn, Key(2), storage).x_test)
    for value in (0, 255):
        pixels, labels = np.full((1, 28, 28), value, np.uint8), np.zeros(1, np.uint8)
        np.savez(tmp_path / "mnist.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
        os.utime(tmp_path / "mnist.npz", ns=(value, value))
        assert float(loaded(images.Mnist(), Key(1), storage).x_train.max()) == value / 255
        assert loaded(images.Mnist(), Key(1), storage) is loaded(images.Mnist(), Key(9), storage)


DEADLY = """
import os, pathlib, signal
from trilemma.aggregation import rules
from trilemma.aggregation.mean import Mean

class Deadly(Mean):
    def __call__(self, *args, **kwargs):
        for one in sorted(pathlib.Path(os.environ["SWEEP_DEATHS"]).glob(type(self).__name__ + "*")):
            one.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(*args, **kwargs)

@rules.register("once")
class Once(Deadly):
    \"\"\"Kills its process, as often as there are files to say so.\"\"\"

@rules.register("twice")
class Twice(Deadly):
    \"\"\"The same with files of its own.\"\"\"
"""


def deadly_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[config.Cell, ...]:
    """Three cells: the first kills its process once, the second twice, the third never."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    (tmp_path / "deaths").mkdir()
    for name in ("Once1", "Twice1", "Twice2"):
        (tmp_path / "deaths" / name).touch()
    monkeypatch.setenv("SWEEP_DEATHS", str(tmp_path / "deaths"))
    (tmp_path / "a.toml").write_text(
        'plugins = ["deadly.py"]\n[run]\nrounds = 3\n[sweep]\naggregation.rule = ["once", "twice", "mean"]\n'
    )
    return config.load_sweep(tmp_path / "a.toml").cells


@pytest.mark.slow
@pytest.mark.usefixtures("plugins_forgotten")
def test_a_killed_worker_is_replaced_and_its_cell_tried_once_more(tmp_path: Path, monkeypatch) -> None:
    once, twice, mean = deadly_cells(tmp_path, monkeypatch)
    outcome = simulate.run_cells([once, twice, mean], tmp_path / "out", jobs=1)
    assert not list((tmp_path / "deaths").iterdir())
    assert outcome.ran == (once.name, mean.name)
    assert {name: failure.reason for name, failure in outcome.failed.items()} == {
        twice.name: "its worker process ended twice, by signal 9 (out of memory?)"
    }


SLOW = """
plugins = ["slow.py"]
attack.name = "slow"
federation = {clients = 7, byzantine = 2}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("plugins_forgotten", "locks_waited_for")
def test_a_killed_sweep_continues_to_the_same_bytes(tmp_path: Path, here: list[str]) -> None:
    """SIGKILL to the whole group in the middle of the third cell, then the same sweep again."""
    slow_attack(tmp_path)
    (tmp_path / "a.toml").write_text(
        SLOW + "[run]\nrounds = 20\ncheckpoint_every = 4\nevaluate_every = 10\n"
        "[sweep]\naggregation.rule = ['mean', 'cwmed', 'caf', 'geomed']\n"
    )
    cells, cut, whole = config.load_sweep(tmp_path / "a.toml").cells, tmp_path / "cut", tmp_path / "whole"
    command = [sys.executable, "-m", "trilemma", "sweep", "a.toml", "--jobs", "2", "--out", "cut"]
    process = _in_a_group(command, tmp_path, "0.2")
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and len(list(cut.glob("*/seed-1/metrics.jsonl"))) < 3:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)  # the workers are in the group
    process.wait(timeout=120)
    deadline = time.monotonic() + 60
    while _alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    done = {path: path.stat().st_mtime_ns for path in cut.glob("*/summary.json")}
    assert 1 <= len(done) < 4, "some cells were finished, some were not"

    again = simulate.run_cells(cells, cut)
    assert (len(again.ran), len(again.before)) == (4 - len(done), len(done)), again.failed
    assert {path: path.stat().st_mtime_ns for path in done} == done, "finished cells are not touched"
    simulate.run_cells(cells, whole)
    assert len(models(whole)) == 4
    assert models(cut) == models(whole)
    assert records(cut) == records(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("plugins_forgotten", "locks_waited_for")
def test_ctrl_c_saves_what_runs_and_the_same_sweep_continues(tmp_path: Path, here: list[str]) -> None:
    """SIGINT to the group, as a terminal sends it: no checkpoint was due, yet the running cell has one."""
    slow_attack(tmp_path)
    (tmp_path / "a.toml").write_text(
        SLOW + "[run]\nrounds = 100\ncheckpoint_every = 100000\nevaluate_every = 100\n"
        "[sweep]\naggregation.rule = ['mean', 'caf']\n"
    )
    cells, cut = config.load_sweep(tmp_path / "a.toml").cells, tmp_path / "cut"
    command = [sys.executable, "-m", "trilemma", "sweep", "a.toml", "--jobs", "1", "--out", "cut"]
    process = _in_a_group(command, tmp_path, "0.5")
    running, deadline = cut / cells[0].name / "seed-1", time.monotonic() + 240
    while time.monotonic() < deadline and not (running / "metrics.jsonl").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=180) != 0
    deadline = time.monotonic() + 120
    while (left := _alive(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "no worker is left behind"
    assert (running / "checkpoint.pt").exists()
    before = len((running / "metrics.jsonl").read_text().splitlines())
    assert 0 < before < 100
    assert not (cut / cells[1].name).exists()

    simulate.run_cells(cells[:1], cut)
    simulate.run(cells[0].config, tmp_path / "alone")
    assert (running / "model.npy").read_bytes() == (tmp_path / "alone/seed-1/model.npy").read_bytes()


DEAF = """
import pathlib, time
from trilemma.attacks import Attack, AttackSettings, Crafted, attacks
from trilemma.simulate.sweep import local

local.GRACE = 1.0

@attacks.register("deaf")
class Deaf(AttackSettings):
    "Takes an hour over its second round, and hears nothing meanwhile."

    def build(self):
        return Attack("deaf", craft=craft)

def craft(view):
    if view.round > 0:
        end = time.monotonic() + 3600
        pathlib.Path("deaf.txt").touch()
        while time.monotonic() < end:
            try:
                time.sleep(end - time.monotonic())
            except KeyboardInterrupt:
                pass
    return Crafted(view.honest.new_zeros(view.byzantine, view.honest.shape[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_hears_nothing_ends_with_its_parent(tmp_path: Path, stop: signal.Signals) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    (tmp_path / "a.toml").write_text(
        SLOW.replace("slow", "deaf") + "[run]\nrounds = 3\n[sweep]\naggregation.rule = ['mean']\n"
    )
    command = [sys.executable, "-m", "trilemma", "sweep", "a.toml", "--jobs", "1", "--out", "cut"]
    process = _in_a_group(command, tmp_path, "0")
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (tmp_path / "deaf.txt").exists():
        time.sleep(0.01)
    process.send_signal(stop)  # the parent alone
    process.wait(timeout=120)
    deadline = time.monotonic() + 60
    while (left := _alive(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for one in left:
        os.kill(one, signal.SIGKILL)
    assert not left, "no worker is left behind"


def _in_a_group(command: list[str], folder: Path, seconds: str) -> subprocess.Popen[bytes]:
    """Start a sweep whose rounds take so long, in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=folder,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        env={**os.environ, SECONDS: seconds},
    )


def _alive(group: int) -> list[int]:
    """Return the processes of a group that are not over."""
    found = []
    for one in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if one.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(one.pid) == group:
                found.append(one.pid)
    return found


def test_a_worker_gives_recordings_back_between_cells_of_other_shapes(monkeypatch):
    forgotten = []
    monkeypatch.setattr("trilemma.base.recordings.forget", lambda: forgotten.append(True))
    _of_shapes.cache_clear()
    counts = []
    for change in (
        "run.seeds=1",
        "attack.name=sf",
        "algorithm.lr=0.5",
        "model.name=mlp",
        "federation.clients=9",
    ):
        _of_shapes(_shapes(config.parse({}, [change])))
        counts.append(len(forgotten))
    assert counts == [1, 1, 1, 2, 3]
