"""A sweep on disk: its cells, which of them are finished, and why others failed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trilemma.base import files
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.typed import typed
from trilemma.experiment import Cell
from trilemma.simulate.experiment import choose_device
from trilemma.simulate.sweep.local import run_jobs
from trilemma.simulate.sweep.work import Failure, Job, Watcher

SWEEP = "sweep.json"
FAILED = "failed"
LOCK = ".lock"


@dataclass(frozen=True)
class CellOutcome:
    """The result of a sweep: names of the cells that ran, that were finished `before`, and that failed."""

    ran: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    failed: Mapping[str, Failure] = field(default_factory=dict)


@dataclass(frozen=True)
class _Cells:
    """The content of `sweep.json`: every cell's values, by its name."""

    cells: dict[str, dict[str, Any]]


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    *,
    jobs: int | None = None,
    task: Path | None = None,
    watcher: Watcher | None = None,
) -> CellOutcome:
    """Run every cell that is not finished in `out`, `jobs` at a time (None: as many as fit).

    Ctrl-C keeps what is finished and saves checkpoints of the rest; the same call continues from there.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs = {jobs}: at least 1 is needed")
    check_device(cells, out)
    _claim(out)
    with files.locked(out / LOCK, UserError(f"another process is sweeping in {str(out)!r}")):
        _remember(out, cells)
        before = tuple(cell.name for cell in cells if finished(out, cell.name))
        waiting = [_job(cell, out, task) for cell in cells if cell.name not in before]
        keeper = _Keeper(out, watcher or Watcher())
        if waiting:
            keeper.waits(waiting)
            run_jobs(waiting, jobs, keeper)
    return CellOutcome(tuple(keeper.ran), before, keeper.failed)


def check_device(cells: Sequence[Cell], out: Path) -> None:
    """Refuse cells none of which could run here for want of a GPU.

    This is said before anything is written. Cells that are finished in `out` need no device: runs of a GPU
    may be read on another machine. If some cells could run, the others fail one by one, as for other reasons.
    """
    left = [cell for cell in cells if not finished(out, cell.name)]
    if left and all(cell.config.run.device == "cuda" for cell in left):
        choose_device("cuda")


def finished(out: Path, name: str) -> bool:
    """Tell whether a cell has a result in `out`."""
    return (out / name / "summary.json").exists()


def known_cells(out: Path) -> dict[str, dict[str, Any]]:
    """Return the values of every cell that was ever asked for in `out`, by name, in order."""
    path = out / SWEEP
    if not path.exists():
        raise UserError(f"{str(out)!r} is not the directory of a sweep: it has no {SWEEP}")
    with files.readable(path, "a sweep's list of cells"):
        return typed(_Cells, json.loads(path.read_text("utf-8"))).cells


def failures(out: Path) -> dict[str, Failure]:
    """Return why cells of `out` have no result, by name."""
    found = {}
    for path in sorted((out / FAILED).glob("*.json")):
        with files.readable(path, "a cell's failure"):
            found[path.stem] = typed(Failure, json.loads(path.read_text("utf-8")))
    return found


class _Keeper(Watcher):
    """A watcher that writes failures to disk, and passes everything on to another watcher."""

    def __init__(self, out: Path, watcher: Watcher) -> None:
        super().__init__(watcher)
        self._out = out
        self.ran: list[str] = []
        self.failed: dict[str, Failure] = {}

    def ended(self, job: Job, failure: Failure | None) -> None:
        path = self._out / FAILED / f"{job.name}.json"
        if failure is None:
            self.ran.append(job.name)
            path.unlink(missing_ok=True)
        else:
            self.failed[job.name] = failure
            said = {"cell": job.label, **asdict(failure)}
            with suppress(OSError):  # a disk that is full, maybe: the outcome says it anyway, others go on
                files.write_atomically(path, json.dumps(said, indent=1, ensure_ascii=False).encode())
        super().ended(job, failure)


def _job(cell: Cell, out: Path, task: Path | None) -> Job:
    return Job(
        name=cell.name,
        label=cell.label,
        folder=str(out.resolve() / cell.name),
        source=cell.config.source,
        rounds=cell.rounds,
        data=repr((cell.config.data, cell.config.features)),
        task=None if task is None else str(task.resolve()),
    )


def _claim(out: Path) -> None:
    """Create the directory; refuse one with anything in it that is not a sweep."""
    if out.exists() and not (out.is_dir() and (_bare(out) or (out / SWEEP).exists())):
        raise UserError(f"{str(out)!r} holds something that is not a sweep; name another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {str(out)!r} ({error.strerror})") from None


def _bare(out: Path) -> bool:
    """Tell whether a folder is empty, but for what a sweep leaves that ended before it began."""
    return {path.name for path in out.iterdir()} <= {LOCK, f"{SWEEP}.tmp"}


def _remember(out: Path, cells: Sequence[Cell]) -> None:
    """Add cells to those in `sweep.json`, so that a later sweep with other values keeps the earlier cells."""
    before = known_cells(out) if (out / SWEEP).exists() else {}
    _write(out, before | {cell.name: dict(cell.values) for cell in cells})


def _write(out: Path, cells: Mapping[str, Any]) -> None:
    files.write_atomically(out / SWEEP, json.dumps({"cells": cells}, indent=1, ensure_ascii=False).encode())
