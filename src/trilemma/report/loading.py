"""From a folder on disk to a `Result`: the directory of a simulated run, or a federation's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trilemma import config as configuration
from trilemma import models
from trilemma.config import OWN, Config
from trilemma.config.assembly import learner_of
from trilemma.errors import UserError, nearest
from trilemma.keys import Key
from trilemma.privacy import NoGuarantee
from trilemma.records import Record, Spread, Summary
from trilemma.report.result import Result
from trilemma.simulate import RunDirectory, assemble
from trilemma.task import Task

BESIDE = ("loss", "variance", "worst_tenth")
"""What stands in a record's scores and is no metric of its own: the loss, and how the first is spread."""

BASELINE = "baseline"
"""Where, below a run's directory, the same run with nobody lying is kept."""


STATISTICS = (
    "running statistics of batch normalisation stay with the clients and never travel: those of {} are the "
    "ones the model started from. Set them by a pass over data of your own before you use it, or train a "
    "model with nn.GroupNorm"
)
"""What is to be known about a federation's model with batch normalisation."""


def load(directory: Path | str, run: str | None = None, task: Task | None = None) -> Result:
    """Read the result in a folder: of a simulated run, or of a federation, finished or under way.

    A federation is named by its own folder or by its server's; `run` says which of its runs, where it has
    more than one. `task` is the run's, where it was made in Python and its whole model is wanted.
    """
    folder = Path(directory)
    if (folder / "federation.toml").is_file() or (folder / "server" / "federation.toml").is_file():
        return _federation(folder, run)
    if run is not None:
        raise UserError(f"{str(folder)!r} is no federation: it has no runs with names")
    return _simulation(folder, task)


def _simulation(folder: Path, task: Task | None = None) -> Result:
    directory = RunDirectory.open(folder)
    settings = directory.config
    seeds = {seed: directory.seed(seed).records() for seed in settings.run.seeds}
    written = folder / "summary.json"
    if written.exists():
        summary = Summary.read(json.loads(written.read_text()))
    else:
        liars = settings.federation.byzantine
        attack = settings.attack.name if liars else "none"
        summary = _so_far(settings, seeds, folder, liars, attack)
    baseline = _simulation(folder / BASELINE, task) if (folder / BASELINE / "config.toml").exists() else None

    def named(flat: Tensor, seed: int) -> dict[str, Tensor]:
        own = task or (directory.task() if directory.has_task else None)
        if own is not None:
            model = learner_of(settings, Key(seed), own, None).model
        elif settings.data.name != OWN and settings.coordinates.train != "all":
            model = assemble(settings, seed).clients.model  # the rest of it comes from the seed
        else:
            return directory.tensors(flat)
        return models.state_dict(model, flat, directory.seed(seed).statistics())

    return Result(
        folder, settings, summary, seeds, lambda seed: directory.seed(seed).model(), named, baseline
    )


def _federation(folder: Path, name: str | None) -> Result:
    from trilemma.federation import wire
    from trilemma.federation.commits import CommitLog
    from trilemma.federation.layout import parties
    from trilemma.federation.task import load_task

    server = parties(folder)[0]
    if server.client is not None:
        raise UserError(f"{str(folder)!r} is a client's folder; the records of all rounds are the server's")
    runs = {path.name: path for path in sorted((server.state / "runs").glob("*"))}
    if not runs:
        raise UserError(f"{str(folder)!r} has not run yet; allowed: trilemma federation run {folder}")
    if name is None and len(runs) > 1:
        raise UserError(f"{str(folder)!r} holds several runs; name one of {', '.join(runs)}")
    chosen = next(iter(runs)) if name is None else name
    if chosen not in runs:
        raise UserError(f"{str(folder)!r} has no run {chosen!r}: {nearest(chosen, runs)}")
    log = CommitLog(runs[chosen])
    settings = configuration.load(server.config)
    seed = settings.run.seeds[0]
    seeds = {seed: [Record.read(record) for record in log.records()]}

    def model(_: int) -> Tensor:
        if not log.result.is_file():
            raise UserError(f"run {chosen!r} has no model yet: it is not finished")
        _header, tensors = wire.loads(log.result.read_bytes(), wire.Finished)
        if "params" not in tensors:
            raise UserError(f"{settings.algorithm.name} has no common model; its clients keep their own")
        return tensors["params"]

    summary = _so_far(settings, seeds, log.folder, None, "unknown")

    def named(flat: Tensor, _: int) -> dict[str, Tensor]:
        return models.state_dict(load_task(server).model, flat)

    def caveat() -> str:
        buffers = load_task(server).model.buffers
        layers = ", ".join(sorted({name.rpartition(".")[0] for name, _ in buffers}))
        return STATISTICS.format(layers) if buffers else ""

    return Result(log.folder, settings, summary, seeds, model, named, find_caveat=caveat)


def _so_far(
    settings: Config, seeds: Mapping[int, Sequence[Record]], folder: Path, liars: int | None, attack: str
) -> Summary:
    """Sum up what the records say, without a certificate: that is the finished run's, or the clients' own."""
    rounds = settings.run.rounds
    done = min(len(records) for records in seeds.values())
    notes = [f"not finished: {done} of {rounds} rounds"] if done < rounds else []
    if liars is None and settings.privacy.threat != "none":
        notes.append("what each client has spent is in its own ledger")
    reason = _uncertified(seeds, done, rounds, deployed=liars is None)
    return Summary(
        metrics={
            name: Spread.of({seed: _latest(records, name) for seed, records in seeds.items()})
            for name in _scored(seeds)
        },
        loss=Spread.of({seed: _latest(records, "loss") for seed, records in seeds.items()}),
        epsilon={},
        delta=None,
        seconds=round(math.fsum(s for one in seeds.values() for r in one for s in r.seconds.values()), 3),
        algorithm=settings.algorithm.name,
        rule=settings.aggregation.rule,
        clients=settings.federation.clients,
        byzantine=liars,
        attack=attack,
        threat=settings.privacy.threat,
        rounds=rounds,
        notes=tuple(notes),
        directory=str(folder),
        verdict={} if settings.privacy.threat == "none" else NoGuarantee(reason).plain(),
    )


def _uncertified(seeds: Mapping[int, Sequence[Record]], done: int, rounds: int, deployed: bool) -> str:
    """Say why a run without a summary has no certificate of its own, and what held for the rounds it did."""
    if deployed:
        return f"after {done} rounds each client's guarantee is in its own ledger, which no server sees"
    last = [records[done - 1] for records in seeds.values()] if done else []
    spent = max((record.epsilon for record in last), default=math.inf)
    held = f"; for those ε = {spent:.3g} was certified ({last[0].accountant})" if math.isfinite(spent) else ""
    return f"unfinished: {done} of {rounds} rounds{held}"


def _scored(seeds: Mapping[int, Sequence[Record]]) -> list[str]:
    """Return the metrics that the records have, without what stands beside them."""
    names = dict.fromkeys(name for one in seeds.values() for record in one for name in record.metrics)
    found = [name for name in names if name not in BESIDE]
    return found or ["accuracy"]


def _latest(records: Sequence[Record], name: str) -> float | None:
    scores = [score for record in records if (score := record.metrics.get(name)) is not None]
    return scores[-1] if scores else None
