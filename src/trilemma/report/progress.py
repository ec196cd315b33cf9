"""A live progress bar: seed, round, the first metric, ε, time left."""

from __future__ import annotations

import math
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trilemma.records import Record


class ProgressBar:
    """An observer (`simulate.Observer`) that draws one bar per seed on standard error."""

    def __init__(self, console: Console, label: str = "") -> None:
        self.label = label
        self._score = ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        """Start a new bar."""
        self._score = ""
        description = f"{self.label} seed {seed}".strip()
        self._task = self._bar.add_task(description, total=rounds, completed=first_round, facts="")

    def round_finished(self, record: Record) -> None:
        """Move the bar."""
        name, score = next(((n, s) for n, s in record.metrics.items() if n != "loss"), ("", None))
        if score is not None:
            self._score = f"accuracy {score:.1%}  " if name == "accuracy" else f"{name} {score:.3g}  "
        by = f" by {record.accountant}" if record.accountant else ""
        epsilon = "∞" if record.epsilon == math.inf else f"{record.epsilon:.3g}{by}"
        facts = f"{self._score}ε {epsilon}"
        assert self._task is not None
        self._bar.update(self._task, completed=record.round, facts=facts)
