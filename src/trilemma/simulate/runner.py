"""Run all seeds of a configuration, in a directory that survives crashes, and summarise them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from trilemma import privacy
from trilemma.base import files
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.records import Record, Spread, Summary
from trilemma.experiment import Config
from trilemma.learning.statistics import PrivateStatistics
from trilemma.simulate import engine
from trilemma.simulate.directory import RunDirectory, SeedDirectory, check_free
from trilemma.simulate.engine import Progress
from trilemma.simulate.evaluation import Evaluation, evaluate
from trilemma.simulate.experiment import Experiment, assemble, settled
from trilemma.simulate.fitting import check_model, check_progress
from trilemma.simulate.observers import Everyone, Observer, with_logs
from trilemma.simulate.ranks import Ranks
from trilemma.simulate.rehearsal import verify
from trilemma.simulate.room import check_room, said_where_memory_ends
from trilemma.simulate.shards import own_progress, shared_out, whole_progress
from trilemma.simulate.state_storage import StateStorage
from trilemma.task import Learner, Task

Announce = Callable[[Config, Learner | None], None]
"""Is told the configuration as it runs, and how a task's model is trained; None: data come out of a set."""


def run(
    config: Config,
    out: Path,
    observer: Observer | None = None,
    task: Task | None = None,
    ranks: Ranks | None = None,
    announce: Announce | None = None,
) -> Summary:
    """Run every seed of `config` in the new directory `out`; nothing is left there if a setting is wrong.

    `task` brings data and model if the configuration's are `own` (`config.parse(…, own=Own(…))`). With
    `ranks`, every rank calls this function with the same arguments, and the ranks share the clients.
    `announce` is told before any ε is spent.
    """
    if isinstance(config.algorithm.options, PrivateStatistics):
        raise ConfigError("[algorithm] statistics train no model: use trilemma statistics, or tl.statistics")
    leads = ranks is None or ranks.leads
    if leads:
        check_free(out)
    task = None if task is None else task.of(config.federation.clients)
    with said_where_memory_ends(config):
        config, ready = _tried_out(config, out, task, ranks, announce)
    directory = RunDirectory.create(out, config, task) if leads else RunDirectory(out, config)
    try:
        return _run(directory, observer or Everyone(), task, ranks, ready)
    except UserError:
        if leads and not any(directory.seed(seed).records() for seed in config.run.seeds):
            directory.remove()  # so that the corrected run can use the same path
        raise


def resume(
    path: Path, observer: Observer | None = None, task: Task | None = None, ranks: Ranks | None = None
) -> Summary:
    """Continue the run in `path` from its last checkpoints; a finished run is only summarised again.

    A task from a file is found in the directory; a task made in Python must be given again.
    """
    directory = RunDirectory.open(path)
    directory.check_unchanged()
    return _run(directory, observer or Everyone(), directory.task() if task is None else task, ranks)


def run_or_resume(
    config: Config,
    out: Path,
    observer: Observer | None = None,
    task: Task | None = None,
    announce: Announce | None = None,
) -> Summary:
    """Continue the run in `out` if there is one, else start it, as a sweep does for each of its cells."""
    if not (out / "config.toml").exists():
        return run(config, out, observer, task, announce=announce)
    config = settled(config, task)
    if announce is not None:
        announce(config, None)
    if RunDirectory.open(out).config.dump() != config.dump():
        raise UserError(f"{str(out)!r} holds a run of another configuration; remove it or name another --out")
    return resume(out, observer, task)


def without_liars(config: Config) -> Config:
    """Return the same run without liars and with the plain mean as the rule; the noise stays the same.

    >>> from trilemma.experiment import parse
    >>> honest = without_liars(parse({}, ["federation.byzantine=2", "aggregation.rule=cwmed"]))
    >>> honest.federation.byzantine, honest.federation.f, honest.aggregation.rule
    (0, 2, 'mean')
    """
    return config.with_(
        "federation.byzantine=0", f"federation.tolerate={config.federation.f}", "aggregation.rule=mean"
    )


def _tried_out(
    config: Config, out: Path, task: Task | None, ranks: Ranks | None, announce: Announce | None
) -> tuple[Config, Experiment | None]:
    """Assemble every seed before anything is written, one at a time, because all may not fit into memory.

    Returns the configuration with the numbers that the first seed's data choose, and the experiment that is
    ready: that of the only seed, or None.
    """
    first, *others = config.run.seeds
    ready = _assembled(config, first, task, ranks)
    config = ready.config
    if announce is not None:
        announce(config, ready.learner)
    check_room(ready, out)
    verify(ready)
    if not others:
        return config, ready
    del ready
    for seed in others:
        _assembled(config, seed, task, ranks)
    return config, None


def _assembled(config: Config, seed: int, task: Task | None, ranks: Ranks | None) -> Experiment:
    found = assemble(config, seed, task, None if ranks is None else ranks.device)
    if config.run.state == "disk" and (found.device.type != "cpu" or ranks is not None):
        raise ConfigError("[run] state = 'disk' is for one process on a CPU; allowed here: memory")
    if config.evaluation.clients and ranks is not None:
        raise ConfigError("[evaluation] clients = true is for one process; leave it out under torchrun")
    return found if ranks is None else shared_out(found, ranks)


def _run(
    directory: RunDirectory,
    observer: Observer,
    task: Task | None,
    ranks: Ranks | None,
    ready: Experiment | None = None,
) -> Summary:
    """Run all seeds, or what is left of them, and sum them up; a seed that diverges stops no other.

    `ready` is the experiment of the only seed, where it was assembled already.
    """
    leads = ranks is None or ranks.leads
    with said_where_memory_ends(directory.config), directory.locked() if leads else nullcontext():
        if ranks is not None:
            ranks.everywhere(None)  # wait until the first rank has made and locked the directory
        observer = with_logs(observer, directory.config.run.log, directory.path) if leads else Everyone()
        results: dict[int, Evaluation | None] = {}
        diverged: dict[str, int] = {}
        experiment = ready
        for seed in directory.config.run.seeds:
            folder = directory.seed(seed)
            experiment = ready or _assembled(directory.config, seed, task, ranks)
            if directory.config.run.state == "disk":
                experiment = replace(experiment, storage=StateStorage(folder.path))
            try:
                results[seed] = _run_seed(experiment, folder, observer)
            except engine.Diverged as stop:
                results[seed] = None
                diverged[str(seed)] = stop.round
        assert experiment is not None  # a configuration has at least one seed
        if not leads:
            return _summary(directory, experiment, results, diverged)
        directory.name_tensors(experiment.clients.model)
        summary = _summary(directory, experiment, results, diverged)
        files.write_atomically(
            directory.path / "summary.json", json.dumps(summary.plain(), indent=2).encode()
        )
        return summary


SAVED_PER_SECOND = 2e8
"""Assumed speed of saving a checkpoint, in bytes per second, until the first one is saved."""


@dataclass
class _Cadence:
    """When to save a checkpoint: `every` so many rounds, or (None) so that it takes 1/20 of the time at most.

    `cost` is how many seconds saving takes, estimated from the size until it is measured.
    """

    every: int | None
    cost: float
    last: float = field(default_factory=time.monotonic)

    def due(self, round_: int) -> bool:
        """Tell whether to save after this round."""
        if self.every is not None:
            return round_ % self.every == 0
        return time.monotonic() - self.last >= 20 * self.cost

    def save(self, experiment: Experiment, folder: SeedDirectory, progress: Progress) -> None:
        """Save a checkpoint, and measure how long it takes."""
        begin = time.monotonic()
        whole = whole_progress(experiment, progress)
        if whole is not None:
            folder.save(whole)
        self.last = time.monotonic()
        self.cost = self.last - begin


def _run_seed(experiment: Experiment, folder: SeedDirectory, observer: Observer) -> Evaluation:
    """Run a seed, or what is left of it, and return how its model scores."""
    run_table = experiment.config.run
    buffers = experiment.clients.model.buffers
    if _everywhere(experiment, folder.finished and not folder.checkpoint_path.exists()):
        observer.seed_started(experiment.seed, run_table.rounds, run_table.rounds)
        model = folder.model()
        with files.readable(folder.model_path, "a model of this run"):
            check_model(experiment, model)
        return evaluate(experiment, model.to(experiment.device), {})

    progress = _restored(experiment, folder) or engine.start(experiment)
    checkpoints = _Cadence(run_table.checkpoint_every, progress.bytes / SAVED_PER_SECOND)
    observer.seed_started(experiment.seed, progress.round, run_table.rounds)
    saved = progress.round
    try:
        while progress.round < run_table.rounds:
            progress, record = engine.step(experiment, progress)
            if experiment.leads:
                record = _written(experiment, folder, progress, record)
            observer.round_finished(record)
            due = progress.round < run_table.rounds and checkpoints.due(progress.round)
            if _everywhere(experiment, due):
                checkpoints.save(experiment, folder, progress)
                saved = progress.round
    except KeyboardInterrupt:
        # Ranks may have been interrupted in different rounds: their last common checkpoint is kept.
        if progress.round > saved and experiment.ranks is None:
            newest = folder.newest()
            if newest is None or newest.round < progress.round:  # while the model was scored, maybe
                _written(experiment, folder, progress, record)
            folder.save(progress)
        raise
    if experiment.leads and not folder.finished:
        if buffers:  # the clients' own running statistics are in no other file
            folder.save(progress)
        honest = [row for row, i in enumerate(experiment.clients.ids) if i not in experiment.byzantine]
        statistics = _statistics(experiment, progress)
        folder.finish(progress.chosen, {name: part[honest].mean(0) for name, part in statistics.items()})
        if not buffers:
            folder.checkpoint_path.unlink(missing_ok=True)
    return evaluate(experiment, progress.chosen, _statistics(experiment, progress))


def _everywhere(experiment: Experiment, here: bool) -> bool:
    """Return the first rank's value: clocks and disks may differ, and all ranks must do the same."""
    return here if experiment.ranks is None else bool(experiment.ranks.everywhere(here))


def _restored(experiment: Experiment, folder: SeedDirectory) -> Progress | None:
    """Return this process's part of the last checkpoint; None if there is none.

    The process that writes also drops the metrics of later rounds.
    """
    progress = folder.checkpoint(experiment.device, mapped=experiment.storage.on_disk)
    if progress is not None:
        with files.readable(folder.checkpoint_path, "a checkpoint of this run"):
            check_progress(experiment, progress)
    if experiment.leads:
        folder.forget_after(progress)
    return None if progress is None else own_progress(experiment, progress)


def _written(experiment: Experiment, folder: SeedDirectory, progress: Progress, record: Record) -> Record:
    """Write a round down, its model scored where it is time to, and return what was written."""
    table = experiment.config.run
    every = table.evaluate_every or max(1, table.rounds // 50)
    if progress.round % every == 0 or progress.round == table.rounds:
        record = _evaluated(experiment, progress, record)
    folder.append(record)
    return record


def _evaluated(experiment: Experiment, progress: Progress, record: Record) -> Record:
    begin = time.perf_counter()
    last = experiment.config.run.returned == "last"
    latest = progress.chosen if last else engine.latest_model(experiment, progress)
    evaluation = evaluate(experiment, latest, _statistics(experiment, progress))
    spent = round(time.perf_counter() - begin, 6)
    scores = {**evaluation.plain(), **record.metrics}
    return replace(record, metrics=scores, seconds={**record.seconds, "evaluate": spent})


def _statistics(experiment: Experiment, progress: Progress) -> dict[str, Tensor]:
    """Return the running statistics in the clients' state; empty for models without any."""
    return {name: progress.clients[name] for name, _ in experiment.clients.model.buffers}


def _names(experiment: Experiment) -> list[str]:
    """Return the names of the run's metrics."""
    own = ["accuracy"] if experiment.learner is None else [*experiment.learner.metrics]
    return own if experiment.attack.backdoor is None else [*own, "backdoor"]


def _over_seeds(results: dict[int, Evaluation | None], name: str) -> Spread:
    scores = {seed: {} if found is None else found.plain() for seed, found in results.items()}
    values = {seed: score.get(name) for seed, score in scores.items()}
    return Spread.of({seed: None if value is None else round(value, 6) for seed, value in values.items()})


def _most_expelled(seeds: Iterable[Sequence[Record]], rounds: int) -> int:
    """Return how many clients were expelled before the last of the `rounds`, in the seed that expelled most.

    A seed that diverged has no record of its last round.
    """
    held = (records[:-1] if len(records) == rounds else records for records in seeds)
    return max((sum(len(record.expelled) for record in records) for records in held), default=0)


def _summary(
    directory: RunDirectory,
    experiment: Experiment,
    results: dict[int, Evaluation | None],
    diverged: dict[str, int],
) -> Summary:
    config, delta = directory.config, directory.config.privacy.delta
    records = [directory.seed(seed).records() for seed in config.run.seeds]
    members = config.federation.clients - _most_expelled(records, config.run.rounds)
    resolved = experiment.resolved.among(members)
    figures: dict[str, float | None] = {}
    notes = list(resolved.notes)
    if resolved.release is not None and resolved.threat is not None:
        beside = resolved.beside(config.run.rounds)
        spent = privacy.spent(resolved.release, resolved.threat, config.run.rounds, delta, beside=beside)
        figures = {name: value if value != float("inf") else None for name, value in spent.epsilon.items()}
        notes.extend(spent.notes)
    held = resolved.certified
    seconds = sum(sum(record.seconds.values()) for some in records for record in some)
    return Summary(
        metrics={name: _over_seeds(results, name) for name in _names(experiment)},
        loss=_over_seeds(results, "loss"),
        epsilon=figures if held else {},
        delta=delta if figures else None,
        seconds=round(seconds, 3),
        algorithm=config.algorithm.name,
        rule=config.aggregation.rule,
        clients=config.federation.clients,
        byzantine=config.federation.byzantine,
        attack=config.attack.name if config.federation.byzantine else "none",
        threat=config.privacy.threat,
        rounds=config.run.rounds,
        accountant=experiment.spending_among(members).by,
        diverged=diverged,
        notes=tuple(dict.fromkeys(notes)),
        directory=str(directory.path),
        printed={} if held else figures,
        verdict=resolved.verdict(config.run.rounds, delta).plain(),
    )
