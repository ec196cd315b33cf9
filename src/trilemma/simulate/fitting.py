"""Whether what lies in a run's directory belongs to the run: checkpoints and models of the same shapes.

A file that was copied from another run is read without complaint; a few rounds later two tensors would not
fit each other, and nobody would think of the file.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trilemma.learning.protocol import State
from trilemma.simulate.engine import Progress
from trilemma.simulate.experiment import Experiment


def check_progress(experiment: Experiment, progress: Progress) -> None:
    """Refuse progress that is not this experiment's."""
    algorithm, clients = experiment.resolved.algorithm, experiment.clients
    if not 0 <= progress.round <= experiment.config.run.rounds:
        raise ValueError(f"it is of round {progress.round}, and there are {experiment.config.run.rounds}")
    one = algorithm.init(clients.model, clients.ids[:1], experiment.key.fold("init"))
    _check_state("broadcast", progress.broadcast, one.broadcast)
    _check_state("server", progress.server, one.server)
    if clients.ids:  # a rank may have none
        first = {name: part[:1] for name, part in progress.clients.items() if part.dim()}
        _check_state("clients", first, one.clients)
    counts = {name: len(part) for name, part in progress.clients.items()}
    if experiment.ranks is None and set(counts.values()) - {len(clients.ids)}:
        raise ValueError(f"clients: it has {max(counts.values())}, and there are {len(clients.ids)}")
    check_model(experiment, progress.chosen)


def check_model(experiment: Experiment, model: Tensor) -> None:
    """Refuse a model (d,), or models (k, d), that are not of this experiment."""
    dim = experiment.clients.model.dim
    if model.dim() not in (1, 2) or model.shape[-1] != dim or not model.is_floating_point():
        raise ValueError(f"a model of shape {tuple(model.shape)}, where {dim} numbers are trained")


def _check_state(whose: str, found: State, expected: State) -> None:
    for name in {**expected, **found}:
        if _kind(found, name) != _kind(expected, name):
            raise ValueError(f"{whose}: {name} is {_kind(found, name)} and not {_kind(expected, name)}")


def _kind(state: Mapping[str, Tensor], name: str) -> str:
    return f"{state[name].dtype} {tuple(state[name].shape)}" if name in state else "not there"
