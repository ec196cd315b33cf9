"""Run a configuration over its seeds, in a directory that survives crashes, and sum it up."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trilemma import files, privacy
from trilemma.config import Config
from trilemma.errors import UserError
from trilemma.records import Record, Spread, Summary
from trilemma.simulate import engine
from trilemma.simulate.directory import RunDirectory, SeedDirectory, check_free
from trilemma.simulate.engine import Progress
from trilemma.simulate.evaluation import Evaluation, evaluate
from trilemma.simulate.experiment import Experiment, assemble


class Observer(Protocol):
    """Told about a run as it goes, to draw a progress bar for instance."""

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        """A seed starts, or continues after `first_round` rounds."""

    def round_finished(self, record: Record) -> None:
        """A round is finished and written down."""


class Silent:
    """An observer that does nothing."""

    def seed_started(self, seed: int, first_round: int, rounds: int) -> None:
        """Do nothing."""

    def round_finished(self, record: Record) -> None:
        """Do nothing."""


def run(config: Config, out: Path, observer: Observer | None = None) -> Summary:
    """Run every seed of `config` in the new directory `out`; a bad setting leaves nothing behind."""
    check_free(out)
    for seed in config.run.seeds:
        assemble(config, seed)
    directory = RunDirectory.create(out, config)
    try:
        return _run(directory, observer or Silent())
    except UserError:
        if not any(directory.seed(seed).records() for seed in config.run.seeds):
            directory.remove()  # the corrected run finds the place free
        raise


def resume(path: Path, observer: Observer | None = None) -> Summary:
    """Continue the run in `path` from its last checkpoints; a finished run is summed up again."""
    return _run(RunDirectory.open(path), observer or Silent())


def run_or_resume(config: Config, out: Path, observer: Observer | None = None) -> Summary:
    """Continue the run in `out` if there is one, else start it: what a sweep does for each of its points."""
    if not (out / "config.toml").exists():
        return run(config, out, observer)
    if RunDirectory.open(out).config.dump() != config.dump():
        raise UserError(f"{str(out)!r} holds a run of another configuration; remove it or name another --out")
    return resume(out, observer)


def without_liars(config: Config) -> Config:
    """Return the same run with nobody lying and the plain mean; noise as before.

    >>> from trilemma.config import parse
    >>> honest = without_liars(parse({}, ["federation.byzantine=2", "aggregation.rule=cwmed"]))
    >>> honest.federation.byzantine, honest.federation.f, honest.aggregation.rule
    (0, 2, 'mean')
    """
    return config.with_(
        "federation.byzantine=0", f"federation.tolerate={config.federation.f}", "aggregation.rule=mean"
    )


def _run(directory: RunDirectory, observer: Observer) -> Summary:
    with directory.locked():
        results: dict[int, Evaluation | None] = {}
        diverged: dict[str, int] = {}
        experiment = None
        for seed in directory.config.run.seeds:
            folder = directory.seed(seed)
            experiment = assemble(directory.config, seed)
            try:
                results[seed] = _run_seed(experiment, folder, observer)
            except engine.Diverged as stop:
                results[seed] = None
                diverged[str(seed)] = stop.round
        assert experiment is not None  # a configuration has at least one seed
        summary = _summary(directory, experiment, results, diverged)
        files.write_atomically(
            directory.path / "summary.json", json.dumps(summary.plain(), indent=2).encode()
        )
        return summary


@dataclass
class _Cadence:
    """When to save: every so many rounds, or as often as costs at most a twentieth of the time."""

    every: int | None
    cost: float = 0.0
    last: float = field(default_factory=time.monotonic)

    def due(self, round_: int) -> bool:
        """Whether to save after this round."""
        if self.every is not None:
            return round_ % self.every == 0
        return time.monotonic() - self.last >= 20 * self.cost

    def save(self, folder: SeedDirectory, progress: Progress) -> None:
        """Save, and remember how long it took."""
        begin = time.monotonic()
        folder.save(progress)
        self.last = time.monotonic()
        self.cost = self.last - begin


def _run_seed(experiment: Experiment, folder: SeedDirectory, observer: Observer) -> Evaluation:
    run_table = experiment.config.run
    evaluate_every = run_table.evaluate_every or max(1, run_table.rounds // 50)
    checkpoints = _Cadence(run_table.checkpoint_every)

    progress = folder.restore(experiment.device) or engine.start(experiment)
    observer.seed_started(experiment.seed, progress.round, run_table.rounds)
    saved = progress.round
    try:
        while progress.round < run_table.rounds:
            progress, record = engine.step(experiment, progress)
            if progress.round % evaluate_every == 0 or progress.round == run_table.rounds:
                record = _evaluated(experiment, progress, record)
            folder.append(record)
            observer.round_finished(record)
            if progress.round < run_table.rounds and checkpoints.due(progress.round):
                checkpoints.save(folder, progress)
                saved = progress.round
    except KeyboardInterrupt:
        if progress.round > saved:
            folder.save(progress)
        raise
    if not folder.finished:
        folder.save(progress)
        folder.finish(progress.chosen)
    return evaluate(experiment, progress.chosen, _statistics(experiment, progress))


def _evaluated(experiment: Experiment, progress: Progress, record: Record) -> Record:
    begin = time.perf_counter()
    latest = engine.latest_model(experiment, progress)
    evaluation = evaluate(experiment, latest, _statistics(experiment, progress))
    spent = round(time.perf_counter() - begin, 6)
    return replace(record, metrics=evaluation.plain(), seconds={**record.seconds, "evaluate": spent})


def _statistics(experiment: Experiment, progress: Progress) -> dict[str, Tensor]:
    """Return the running statistics clients keep in their state, for models that have them."""
    return {name: progress.clients[name] for name, _ in experiment.clients.model.buffers}


def _summary(
    directory: RunDirectory,
    experiment: Experiment,
    results: dict[int, Evaluation | None],
    diverged: dict[str, int],
) -> Summary:
    config, resolved = directory.config, experiment.resolved
    epsilon: dict[str, float | None] = {}
    notes = list(resolved.notes)
    if resolved.release is not None and resolved.threat is not None:
        spent = privacy.spent(resolved.release, resolved.threat, config.run.rounds, config.privacy.delta)
        epsilon = {name: value if value != float("inf") else None for name, value in spent.epsilon.items()}
        notes.extend(spent.notes)
    seconds = sum(
        sum(record.seconds.values()) for seed in config.run.seeds for record in directory.seed(seed).records()
    )
    return Summary(
        accuracy=Spread.of({s: round(r.accuracy, 6) if r else None for s, r in results.items()}),
        loss=Spread.of({s: round(r.loss, 6) if r else None for s, r in results.items()}),
        epsilon=epsilon,
        delta=config.privacy.delta if epsilon else None,
        seconds=round(seconds, 3),
        algorithm=config.algorithm.name,
        rule=config.aggregation.rule,
        clients=config.federation.clients,
        byzantine=config.federation.byzantine,
        attack=config.attack.name if config.federation.byzantine else "none",
        threat=config.privacy.threat,
        rounds=config.run.rounds,
        diverged=diverged,
        notes=tuple(dict.fromkeys(notes)),
        directory=str(directory.path),
    )
