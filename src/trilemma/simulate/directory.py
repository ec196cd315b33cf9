"""The directory of a run: the files on disk, and how they survive a crash.

    config.toml              the resolved configuration with all defaults; it can be run again as it is
    config.sha256            a digest of it as the run began, without what may change since (`HARMLESS`)
    task/, task.json         copies of a task's files, and where they came from
    model.json               names and shapes of the trained tensors, in the order of model.npy
    my_rules.py              a copy of each plugin's file, whose digest is in config.toml
    seed-1/metrics.jsonl     one line per round, written when the round is finished
    seed-1/checkpoint.pt     the latest checkpoint, replaced atomically; removed when the seed is finished,
                             unless clients keep running statistics, which are in no other file
    seed-1/model.npy         the returned model, written when the seed is finished
    seed-1/statistics.npz    mean running statistics of the honest clients, for batch normalisation
    summary.json             accuracy, loss, ε by accountant, seconds
    curves.png               accuracy over rounds
    suspects.png             every client's weight in the aggregate over rounds
    tensorboard/seed-1/      event files, if [run] log asks for them

A killed run loses only the rounds since its last checkpoint. When it is resumed, metrics written after that
checkpoint are dropped and computed again, with the same values.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import itertools
import json
import math
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma import experiment as configuration
from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.records import Record
from trilemma.base.typed import Count, typed
from trilemma.experiment import OWN, Config
from trilemma.models import Model
from trilemma.simulate.engine import Progress
from trilemma.task import Task, copy_task, task_digest

TASK = "task.py"
DIGEST = "config.sha256"

HARMLESS = frozenset({"device", "at_once", "state", "log", "checkpoint_every"})
"""Keys of `[run]` that may be changed before a run is continued."""

LOOK_BACK = (1 << 14, 1 << 20)
"""How many bytes at the end of a seed's records are searched for the newest one; tried in this order."""


@dataclass(frozen=True)
class SeedDirectory:
    """The part of a run directory that belongs to one seed."""

    path: Path

    @property
    def metrics_path(self) -> Path:
        """One JSON object per finished round."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoint_path(self) -> Path:
        """The latest checkpoint."""
        return self.path / "checkpoint.pt"

    @property
    def model_path(self) -> Path:
        """The returned model, float32; the file exists once the seed is finished."""
        return self.path / "model.npy"

    @property
    def finished(self) -> bool:
        """Whether this seed has run to its end."""
        return self.model_path.exists()

    def append(self, record: Record) -> None:
        """Append the record of one round."""
        with files.told_of(self.metrics_path), self.metrics_path.open("a") as file:
            file.write(json.dumps(record.plain()) + "\n")

    def records(self) -> list[Record]:
        """Return all complete records; an incomplete last line is ignored."""
        if not self.metrics_path.exists():
            return []
        with files.readable(self.metrics_path, "records of a seed"):
            lines = self.metrics_path.read_text("utf-8").split("\n")
            return [Record.read(json.loads(line)) for line in lines[:-1]]

    def newest(self, wanted: Callable[[Record], bool] = lambda _: True) -> Record | None:
        """Return the newest complete record for which `wanted` is true; None if none is near the end.

        Only the end of the file is read (`LOOK_BACK`), because it may be long.
        """
        if not self.metrics_path.exists():
            return None
        with files.readable(self.metrics_path, "records of a seed"), self.metrics_path.open("rb") as file:
            length = file.seek(0, io.SEEK_END)
            for back in LOOK_BACK:
                start = max(0, length - back)
                file.seek(start)
                lines = file.read(length - start).split(b"\n")[1 if start else 0 : -1]
                found = (Record.read(json.loads(line)) for line in reversed(lines))
                chosen = next((record for record in found if wanted(record)), None)
                if chosen is not None or start == 0:
                    return chosen
        return None

    def save(self, progress: Progress) -> None:
        """Replace the checkpoint, when the records of its rounds are on disk."""
        files.sync(self.metrics_path)
        with files.replaced(self.checkpoint_path) as new, new.open("wb") as file:
            torch.save({part.name: getattr(progress, part.name) for part in fields(progress)}, file)

    def forget_after(self, progress: Progress | None) -> None:
        """Drop the metrics of rounds after a checkpoint; None: there is no checkpoint, so drop all."""
        self.path.mkdir(parents=True, exist_ok=True)
        files.half_written(self.checkpoint_path).unlink(missing_ok=True)  # of a process that was killed
        if progress is None:
            self.metrics_path.unlink(missing_ok=True)
            return
        kept = [record for record in self.records() if record.round <= progress.round]
        if [record.round for record in kept] != [*range(1, progress.round + 1)]:
            raise UserError(
                f"{str(self.metrics_path)!r} lacks records of the {progress.round} rounds of the checkpoint "
                f"beside it; remove {self.checkpoint_path.name} to run this seed from its beginning"
            )
        text = "".join(json.dumps(record.plain()) + "\n" for record in kept)
        files.write_atomically(self.metrics_path, text.encode())

    def checkpoint(self, device: torch.device, mapped: bool = False) -> Progress | None:
        """Return the progress of the latest checkpoint; None if there is none.

        `mapped`: the file is mapped into memory instead of read.
        """
        if not self.checkpoint_path.exists():
            return None
        with files.readable(self.checkpoint_path, "a checkpoint"):
            found = torch.load(self.checkpoint_path, map_location=device, weights_only=True, mmap=mapped)
            return _progress(found)

    def model(self) -> Tensor:
        """Return the returned model: (d,), or (k, d) if clients have models of their own."""
        if not self.finished:
            raise UserError(f"{str(self.path)!r} has no model yet: this seed is not finished, or it diverged")
        with files.readable(self.model_path, "a model"):
            return torch.from_numpy(np.load(self.model_path))

    def statistics(self) -> dict[str, Tensor] | None:
        """Return the running statistics of the returned model; None if it has none."""
        path = self.path / "statistics.npz"
        if not path.exists():
            return None
        with files.readable(path, "running statistics"), np.load(path) as found:
            return {name: torch.from_numpy(found[name]) for name in found.files}

    def finish(self, chosen: Tensor, statistics: Mapping[str, Tensor] | None = None) -> None:
        """Write the returned model and its running statistics, which marks the seed as finished."""
        if statistics:
            buffer = io.BytesIO()
            arrays: Any = {name: part.detach().cpu().numpy() for name, part in statistics.items()}
            np.savez(buffer, **arrays)
            files.write_atomically(self.path / "statistics.npz", buffer.getvalue())
        buffer = io.BytesIO()
        np.save(buffer, chosen.detach().cpu().numpy())
        files.write_atomically(self.model_path, buffer.getvalue())


def _progress(found: Mapping[str, Any]) -> Progress:
    """Return the progress in a checkpoint; raise a `ValueError` if it has other types."""
    progress = Progress(**found)
    states = (progress.broadcast, progress.clients, progress.server, {"chosen": progress.chosen})
    wrong = [name for state in states for name, part in state.items() if not isinstance(part, Tensor)]
    if wrong or type(progress.round) is not int:
        raise ValueError(f"{wrong[0]} is no tensor" if wrong else "its round is no number")
    return progress


@dataclass(frozen=True)
class _Tensors:
    """The content of `model.json`: names and shapes."""

    tensors: list[tuple[str, list[Count]]]


@dataclass(frozen=True)
class RunDirectory:
    """A run on disk."""

    path: Path
    config: Config

    @classmethod
    def create(cls, path: Path, config: Config, task: Task | None = None) -> RunDirectory:
        """Start a run in a new or empty directory, with copies of the task's and plugins' files."""
        check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the directory {str(path)!r} ({error.strerror}); name another --out"
            ) from None
        directory = cls(path, config)
        try:
            directory._begin(task)
        except OSError:
            directory.remove()  # so that the same path is free where there is room again
            raise
        return directory

    def _begin(self, task: Task | None) -> None:
        """Write what the run is made from; the configuration last, which makes the directory a run's."""
        if task is not None and task.path is not None:
            (self.path / "task").mkdir()
            copy_task(task.path, self.path / "task", TASK)
            origin = {"file": str(task.path), "sha256": task_digest(task.path)}
            files.write_atomically(self.path / "task.json", json.dumps(origin, indent=2).encode())
        for plugin in self.config.plugins:
            plugin.copy_into(self.path)
        text = self.config.toml()
        files.write_atomically(self.path / DIGEST, f"{_digest(text)}\n".encode())
        files.write_atomically(self.path / "config.toml", text.encode())

    def check_unchanged(self) -> None:
        """Refuse to continue a run by another configuration: its ε would be that of noise it did not draw."""
        path, now = self.path / DIGEST, _digest((self.path / "config.toml").read_text("utf-8"))
        if not path.exists() or path.read_bytes().strip() != now.encode():
            raise UserError(
                f"{str(self.path / 'config.toml')!r} was changed since this run began; put it back as it "
                f"was, or start a new run with it (of [run], {', '.join(sorted(HARMLESS))} may change)"
            )

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open a run that was started before."""
        if not path.is_dir():
            raise UserError(f"there is no folder {str(path)!r}")
        if not (path / "config.toml").exists():
            raise UserError(f"{str(path)!r} is not a run directory: it has no config.toml")
        return cls(path, configuration.load(path / "config.toml"))

    @property
    def has_task(self) -> bool:
        """Whether the directory holds a task's files."""
        return (self.path / "task.json").exists()

    def name_tensors(self, model: Model) -> None:
        """Write the names and shapes of the trained tensors."""
        shapes = [[name, list(shape)] for name, shape in model.shapes]
        files.write_atomically(self.path / "model.json", json.dumps({"tensors": shapes}).encode())

    @property
    def dim(self) -> int:
        """How many parameters are trained, d."""
        return sum(math.prod(shape) for _, shape in self._shapes)

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the trained parameters (d,) as tensors by name."""
        found: dict[str, Tensor] = {}
        start = 0
        with files.readable(self.path / "model.json", "names of tensors"):
            for name, shape in self._shapes:
                stop = start + math.prod(shape)
                found[name] = flat[start:stop].reshape(shape).clone()
                start = stop
        return found

    @property
    def _shapes(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of the trained tensors."""
        path = self.path / "model.json"
        with files.readable(path, "names of tensors"):
            return typed(_Tensors, json.loads(path.read_text("utf-8"))).tensors

    def task(self) -> Task | None:
        """Return the task of the run if it came from a file; refuse one that has changed since.

        The original file is preferred to the copy, because its data may lie beside it. None: no task.
        """
        if not self.has_task:
            if self.config.data.name == OWN:
                raise UserError(
                    f"the task of {str(self.path)!r} was made in Python and is not on disk: continue where "
                    "it is made, with trilemma.run(task, …, out=…, resume=True)"
                )
            return None
        with files.readable(self.path / "task.json", "where a task came from"):
            origin = json.loads((self.path / "task.json").read_text("utf-8"))
            given, digest = Path(origin["file"]), origin["sha256"]
        kept = self.path / "task" / TASK
        path = given if given.is_file() else kept
        if task_digest(path) != digest:
            raise UserError(
                f"{str(path)!r} was changed since this run began; put it back as it was ({str(kept)!r} is a "
                "copy), or start a new run"
            )
        return Task.from_file(path, self.config.federation.clients)

    def seed(self, seed: int) -> SeedDirectory:
        """Return the directory of one seed."""
        return SeedDirectory(self.path / f"seed-{seed}")

    def remove(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run; refuse if another process is working on it."""
        refusal = UserError(f"another process is working on {str(self.path)!r}")
        with files.locked(self.path / ".lock", refusal):
            yield


def _digest(text: str) -> str:
    """Return a digest of a configuration's text, whatever it says under harmless keys."""
    tables = tomllib.loads(text)
    told = {key: value for key, value in tables.get("run", {}).items() if key not in HARMLESS}
    return hashlib.sha256(json.dumps({**tables, "run": told}, sort_keys=True).encode()).hexdigest()


def check_free(path: Path) -> None:
    """Refuse a path for a new run that is a file or a directory with anything in it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"{str(path)!r} already holds something; continue it with --resume {path}, or name another --out"
        )


def named_directory(config: Config) -> Path:
    """Return a free path below `runs/`, for a run without --out."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{config.data.name}-{config.algorithm.name}-{config.aggregation.rule}"
    return fresh_directory(Path("runs"), name)


def fresh_directory(parent: Path, name: str) -> Path:
    """Return a path below `parent` that does not exist: `name`, or else `name-2`, `name-3` and so on.

    >>> fresh_directory(Path("/nowhere"), "demo").name
    'demo'
    """
    numbered = (parent / f"{name}-{number}" for number in itertools.count(2))
    return next(path for path in itertools.chain([parent / name], numbered) if not path.exists())
