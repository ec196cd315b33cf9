"""From a folder on disk to a `Result`: the directory of a simulated run, or a federation's."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from trilemma import experiment as configuration
from trilemma import models
from trilemma.base.errors import UserError, nearest
from trilemma.base.keys import Key
from trilemma.experiment import OWN
from trilemma.experiment.assembly import learner_of, of_task
from trilemma.report.result import Result
from trilemma.report.run_metadata import (
    BASELINE,
    deployed_records,
    simulated_records,
    so_far,
    written_summary,
)
from trilemma.report.trained import Trained, in_use
from trilemma.simulate import RunDirectory, assemble
from trilemma.task import Task

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


def load_cell(directory: Path) -> Result:
    """Read the run of a sweep's cell; what cannot be read is told with its folder: all have such files."""
    try:
        return load(directory)
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None


def _simulation(folder: Path, task: Task | None = None) -> Result:
    """Read the result of a simulated run, and of the same run without liars where it is kept beside."""
    directory = RunDirectory.open(folder)
    settings = directory.config
    plain = settings.dump()
    seeds = simulated_records(plain, folder)
    summary = written_summary(folder) or so_far(plain, seeds, folder)
    baseline = _simulation(folder / BASELINE, task) if (folder / BASELINE / "config.toml").exists() else None

    def named(flat: Tensor, seed: int) -> dict[str, Tensor]:
        """Return the whole model by the names of its parts, what was not trained included."""
        own = task or (directory.task() if directory.has_task else None)
        if own is not None:
            model = learner_of(settings, Key(seed), own, None).model
        elif settings.data.name != OWN and settings.coordinates.train != "all":
            model = assemble(settings, seed).clients.model  # the rest of it comes from the seed
        else:
            return directory.tensors(flat)
        return models.state_dict(model, flat, directory.seed(seed).statistics())

    def trained(seed: int) -> Trained:
        """Return a seed's model with what it takes to use it."""
        own = task or (directory.task() if directory.has_task else None)
        statistics = directory.seed(seed).statistics() or {}
        if own is None:
            return in_use(assemble(settings, seed).clients.model, result, seed, statistics)
        learner, _ = of_task(settings, Key(seed), own)
        return in_use(learner.model, result, seed, statistics, learner, own)

    result = Result(
        *(folder, settings, summary, seeds, lambda seed: directory.seed(seed).model(), named, baseline),
        find_trained=trained,
    )
    return result


def _federation(folder: Path, name: str | None) -> Result:
    """Read the result of a federation's run from its server's folder."""
    from trilemma.federation.party.layout import parties
    from trilemma.federation.party.task import load_task
    from trilemma.federation.server.commits import CommitLog, result_of

    server = parties(folder)[0]
    if server.client is not None:
        raise UserError(f"{str(folder)!r} is a client's folder; the records of all rounds are the server's")
    runs = {path.name: path for path in sorted((server.state / "runs").glob("*"))}
    if not runs:
        raise UserError(f"{str(folder)!r} has not run yet; allowed: trilemma federation run {folder}")
    ended = [one for one, path in runs.items() if CommitLog(path).result.is_file()]
    if name is None and len(runs) > 1 and len(ended) != 1:
        have = f"{', '.join(ended)} have a model" if ended else "none has a model yet"
        raise UserError(
            f"{str(folder)!r} holds several runs ({', '.join(runs)}); {have}: name one (run=, --run)"
        )
    chosen = (ended if len(runs) > 1 else [*runs])[0] if name is None else name
    if chosen not in runs:
        raise UserError(f"{str(folder)!r} has no run {chosen!r}: {nearest(chosen, runs)}")
    log = CommitLog(runs[chosen])
    settings = configuration.load(server.config)
    plain = settings.dump()
    seeds = deployed_records(plain, runs[chosen])

    def model(_: int) -> Tensor:
        if not log.result.is_file():
            raise UserError(f"run {chosen!r} has no model yet: it is not finished")
        log.check_began_with(server)  # a seed decides which features were drawn
        tensors = result_of(log.result, chosen)
        if "params" not in tensors:
            raise UserError(f"{settings.algorithm.name} has no common model; its clients keep their own")
        return tensors["params"]

    summary = so_far(plain, seeds, log.folder, deployed=True)

    def named(flat: Tensor, _: int) -> dict[str, Tensor]:
        return models.state_dict(load_task(server).model, flat)

    def caveat() -> str:
        return about_statistics(load_task(server).model)

    def trained(seed: int) -> Trained:
        party = load_task(server)
        own = None if server.task is None else Task.from_file(server.task)
        return in_use(party.model, result, seed, {}, party.assembled.learner, own)

    result = Result(
        *(log.folder, settings, summary, seeds, model, named), find_caveat=caveat, find_trained=trained
    )
    return result


def about_statistics(model: models.Model) -> str:
    """Say what is to be known about a federation's model with running statistics; "": it has none."""
    layers = ", ".join(sorted({name.rpartition(".")[0] for name, _ in model.buffers}))
    return STATISTICS.format(layers) if model.buffers else ""
