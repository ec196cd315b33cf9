"""Who is told about a run: several at once, and TensorBoard's event files, read back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trilemma import config, simulate
from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.simulate.observers import EventFiles

LOGGED = config.parse({}, ["run.rounds=3", "run.evaluate_every=3", "run.log=['tensorboard']"])


def read(folder: Path) -> dict[str, dict[int, float]]:
    """The scalars in event files, by name and step; later files replace what earlier ones said."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_event_files_hold_what_the_records_say(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    simulate.run(LOGGED, tmp_path / "run")
    records = simulate.RunDirectory.open(tmp_path / "run").seed(1).records()
    scalars = read(tmp_path / "run" / "tensorboard" / "seed-1")
    assert scalars["train/loss"] == pytest.approx({r.round: r.train_loss for r in records})
    assert scalars["test/accuracy"] == pytest.approx({3: records[-1].metrics["accuracy"]})
    assert "weight/client 6" in scalars
    assert not any(name.startswith("privacy/") for name in scalars)  # nothing is certified


def test_a_seed_that_continues_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first, loss in ((0, 1.0), (1, 2.0)):
        log = EventFiles(tmp_path)
        log.seed_started(1, first, 3)
        for round_ in range(first + 1, 4):
            log.round_finished(Record(round_, train_loss=loss))
    assert read(tmp_path / "seed-1")["train/loss"] == {1: 1.0, 2: 2.0, 3: 2.0}


def test_without_tensorboard_the_cure_is_told_and_nothing_is_left_behind(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"pip install 'trilemma\[tensorboard\]'"):
        simulate.run(LOGGED, tmp_path / "run")
    assert not (tmp_path / "run").exists()
