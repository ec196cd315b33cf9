"""Observers of a run: progress bars, TensorBoard, or a user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from trilemma.base.errors import UserError
from trilemma.base.records import Record


class Observer(Protocol):
    """Is told about a run while it runs, for example to draw a progress bar."""

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        """A seed starts, or continues after `first_round` rounds."""

    def round_finished(self, record: Record) -> None:
        """A round is finished and its record is written."""


class Everyone:
    """An observer that passes everything on to others, or to nobody."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.observers = tuple(observers)

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        """Tell everyone."""
        for observer in self.observers:
            observer.seed_started(seed, first_round, rounds)

    def round_finished(self, record: Record) -> None:
        """Tell everyone."""
        for observer in self.observers:
            observer.round_finished(record)


class EventFiles:
    """An observer that writes TensorBoard's event files, in one folder per seed.

    A seed that continues from a checkpoint replaces what was written after it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise UserError(
                "[run] log = ['tensorboard'] needs TensorBoard: pip install 'trilemma[tensorboard]'"
            ) from None
        self._folder, self._make, self._writer = folder, SummaryWriter, None

    _writer: Any

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        """Open the seed's event file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._make(str(self._folder / f"seed-{seed}"), purge_step=first_round + 1)

    def round_finished(self, record: Record) -> None:
        """Write a round's figures."""
        for name, value in figures(record).items():
            self._writer.add_scalar(name, value, record.round)
        self._writer.flush()


def figures(record: Record) -> dict[str, float]:
    """Return a round's finite numbers, named "kind/name" as experiment trackers expect.

    >>> figures(Record(1, epsilon=0.5, accountant="pld", metrics={"accuracy": 0.9}, weights={3: 0.25}))
    {'test/accuracy': 0.9, 'privacy/epsilon by pld': 0.5, 'weight/client 3': 0.25}
    """
    found = {
        **{f"test/{name}": score for name, score in record.metrics.items()},
        "train/loss": record.train_loss,
        f"privacy/epsilon by {record.accountant}": record.epsilon,
        **{f"facts/{name}": fact for name, fact in record.facts.items()},
        **{f"weight/client {client}": weight for client, weight in record.weights.items()},
        "attack/strength": record.attack_strength,
    }
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def with_logs(observer: Observer, logs: Sequence[str], directory: Path) -> Observer:
    """Return an observer that also writes the named logs, each to a folder of that name in `directory`."""
    from trilemma.simulate.trackers import LOGS

    return Everyone([observer, *(LOGS[name](directory / name) for name in logs)]) if logs else observer


Watch = Callable[[str], AbstractContextManager[Observer]]
"""What shows a run that is called so while it goes on."""
