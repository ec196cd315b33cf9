"""Inspect a task under a configuration without running it, and check a model before a run."""

from __future__ import annotations

from dataclasses import replace

from trilemma import experiment as configuration
from trilemma import models, privacy
from trilemma.base.errors import ConfigError, UserError
from trilemma.base.keys import Key
from trilemma.data import declaration_of
from trilemma.experiment.assembly import of_task
from trilemma.models.modules.reference import COMPARED
from trilemma.simulate.experiment import Experiment, assemble
from trilemma.task import Task
from trilemma.task.inspection import Inspection, inspect, invented, verify_made
from trilemma.task.neighbours import changes, told


def look(task: Task, path: str | None = None, device: str = "cpu", neighbours: bool = False) -> Inspection:
    """Inspect a task; with the configuration at `path`, also its batches, clipping and ε.

    With `neighbours`, also see how many examples change where one record does.
    """
    if neighbours:
        known = task if path is None else task.of(_settings(task, path).federation.clients)
        seen, wrong = told(changes(known), task.examples)
        found = look(task, path, device)
        facts = {**found.facts, "neighbours": seen}
        return replace(found, facts=facts, problems=(*found.problems, *wrong))
    if path is None:
        return inspect(task, device=device)
    settings = _settings(task, path)
    task = task.of(settings.federation.clients)
    options = settings.algorithm.options
    by_example = settings.privacy.clip is not None and getattr(options, "unit", "user") == "example"
    ready = of_task(settings, Key(settings.run.seeds[0]), task, device)
    found = inspect(task, getattr(options, "batch_size", 32), by_example, device, ready)
    try:
        experiment = assemble(settings, settings.run.seeds[0], task)
    except UserError as error:
        return replace(found, problems=(*found.problems, str(error)))
    return replace(found, facts={**found.facts, "the run": _run(experiment)})


def _settings(task: Task, path: str) -> configuration.Config:
    return configuration.load(path, own=configuration.Own(task.clients_known))


def _run(experiment: Experiment) -> list[str]:
    settings, resolved = experiment.config, experiment.resolved
    lines = [
        f"{settings.algorithm.name} with {settings.aggregation.rule}, {settings.run.rounds} rounds, "
        f"{len(experiment.honest)} honest clients of {settings.federation.clients}"
    ]
    release, threat = resolved.release, resolved.threat
    if release is None or threat is None:
        return [*lines, "no privacy: nothing is clipped and noised", *resolved.notes]
    rounds, beside = settings.run.rounds, resolved.beside(settings.run.rounds)
    spent = privacy.spent(release, threat, rounds, settings.privacy.delta, beside=beside)
    name, epsilon = spent.tightest
    lines.append(
        f"{release.unit} level: clipped at {release.clip:g}, ε = {epsilon:.3g} at "
        f"δ = {settings.privacy.delta:g} by {name} under {settings.privacy.threat}"
    )
    return [*lines, *resolved.notes]


def verify(experiment: Experiment) -> None:
    """Check, before any ε is spent, that gradients equal those of a plain loop, for a task's model.

    On made-up examples and on the first client's own. Also refuse batch normalisation with an algorithm that
    does not keep running statistics.
    """
    clients = experiment.clients
    if clients.model.buffers:
        algorithm = experiment.resolved.algorithm
        kept = algorithm.init(clients.model, clients.ids[:1], experiment.key.fold("init")).clients
        if any(name not in kept for name, _ in clients.model.buffers):
            raise ConfigError(
                f"{algorithm.name} keeps no running statistics, which the batch normalisation of "
                f"{clients.model.name!r} needs: use nn.GroupNorm instead, put these layers in eval mode, or "
                "choose another algorithm, as fedavg"
            )
    if experiment.learner is None:
        return
    params = clients.model.init(Key(experiment.seed)).to(experiment.device)
    first = clients.only(clients.ids[0])
    own = first.sample(min(COMPARED, int(clients.data.sizes.min())), Key(1))
    models.verify(clients.model, params, own)
    seen = declaration_of(clients.data.dataset, seen=True)
    verify_made(clients.model, params, invented(seen, experiment.device))
