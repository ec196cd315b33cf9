"""State on disk, clients stepped some at a time: the bytes of a run in memory, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trilemma import config, simulate
from trilemma.simulate.state_storage import StateStorage

BASE = {
    "data": {"name": "phishing"},
    "model": {"name": "logistic"},
    "federation": {"clients": 7, "byzantine": 2},
    "aggregation": {"rule": "caf"},
    "attack": {"name": "sf"},
    "run": {"rounds": 6, "checkpoint_every": 2, "evaluate_every": 3, "at_once": 2, "device": "cpu"},
}
CASES = {
    "what is sent is what is kept": [],
    "liars anywhere": [
        "federation.placement=random",
        "data.holders=all",
        "attack={name='alie', strength='search'}",
    ],
    "more is kept than sent": [
        "algorithm={name='byz-clip21-sgd2m'}",
        "privacy={threat='ldp', clip=0.1, epsilon=8.0}",
    ],
    "only those who are heard are stepped": ["federation.sampled=5"],
    "models of their own": ["algorithm={name='pfedme', inner_steps=2, local_rounds=1}", "attack={name='lf'}"],
}


def files(path: Path) -> list[bytes]:
    return [(path / f"seed-1/{name}").read_bytes() for name in ("model.npy",)]


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_run_on_disk_is_that_in_memory(tmp_path: Path, changes: list[str]) -> None:
    settings = config.parse(BASE, changes)
    here = simulate.run(settings, tmp_path / "memory")
    there = simulate.run(settings.with_("run.state=disk"), tmp_path / "disk")
    assert files(tmp_path / "disk") == files(tmp_path / "memory")
    assert there.metrics == here.metrics
    assert not list((tmp_path / "disk").rglob(".state*"))


def test_a_run_on_disk_that_was_stopped_continues(tmp_path: Path) -> None:
    class Stop:
        def seed_started(self, *_) -> None: ...

        def round_finished(self, record: simulate.Record) -> None:
            if record.round == 3:
                raise KeyboardInterrupt

    settings = config.parse(BASE, ["run.state=disk"])
    simulate.run(settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        simulate.run(settings, tmp_path / "cut", Stop())
    assert (tmp_path / "cut/seed-1/checkpoint.pt").exists()
    simulate.resume(tmp_path / "cut")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_clients_stepped_some_at_a_time_are_those_stepped_together(tmp_path: Path) -> None:
    settings = config.parse(BASE, ["privacy={threat='secldp', clip=1, epsilon=8}", "algorithm.name=cafcor"])
    models = []
    for size in (2, 7):
        simulate.run(settings.with_(f"run.at_once={size}"), tmp_path / str(size))
        models.append(simulate.RunDirectory.open(tmp_path / str(size)).seed(1).model())
    assert torch.allclose(*models, rtol=0, atol=1e-6)


def test_a_tensor_on_the_shelf_is_a_file_without_a_name(tmp_path: Path) -> None:
    rows = StateStorage(tmp_path).empty((100, 50), torch.ones(1))
    rows.fill_(3.0)
    assert float(rows.sum()) == 15000.0
    assert list(tmp_path.iterdir()) == []
    maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ".mapped-"
    assert ".mapped-" in maps, "it is mapped from a file that has been removed"


LIMITED = """
import resource, sys, torch
from pathlib import Path
from trilemma import config, simulate

def settings(clients, hidden):
    tables = {
        "data": {"name": "phishing", "holders": "all"},
        "model": {"name": "mlp", "hidden": [hidden]},
        "federation": {"clients": clients, "byzantine": 2, "placement": "random"},
        "algorithm": {"name": "dsgd", "lr": 0.1, "batch_size": 8},
        "aggregation": {"rule": "cwtm"},
        "attack": {"name": "sf"},
        "run": {"rounds": 2, "checkpoint_every": 9, "device": "cpu", "at_once": 2, "state": "disk"},
    }
    return config.parse(tables, [])

torch.set_num_threads(1)
import trilemma.learning.steps.server as server
server.BLOCK = 1 << 18
simulate.run(settings(10, 10), Path(sys.argv[1]) / "small")      # what is imported and compiled is there
used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
clients, hidden = 160, 4200
room = clients * 71 * hidden * 4 // 2
resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
simulate.run(settings(clients, hidden), Path(sys.argv[1]) / "large")
try:
    torch.zeros(clients, 71 * hidden)
except RuntimeError:
    print("all of it does not fit")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_clients_on_disk_take_twice_the_memory_there_is(tmp_path: Path) -> None:
    """191 MB of messages, twice that with the state, in 95 MB: a limit of the system's, not an estimate."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all of it does not fit"
