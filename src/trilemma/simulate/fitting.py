"""Check that checkpoints and models in a run's directory belong to the run: that shapes and types agree.

Without this check, a file copied from another run would be read without an error, and fail a few rounds later
with a message about two tensors that says nothing about the file.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trilemma.learning.protocol import State
from trilemma.simulate.engine import Progress
from trilemma.simulate.experiment import Experiment


def check_progress(experiment: Experiment, progress: Progress) -> None:
    """Raise a `ValueError` if the progress does not fit this experiment."""
    algorithm, clients = experiment.resolved.algorithm, experiment.clients
    if not 0 <= progress.round <= experiment.config.run.rounds:
        raise ValueError(f"it is of round {progress.round}, and there are {experiment.config.run.rounds}")
    one = algorithm.init(clients.model, clients.ids[:1], experiment.key.fold("init"))
    _check_state("broadcast", progress.broadcast, one.broadcast)
    _check_state("server", progress.server, one.server)
    if clients.ids:  # a rank may have no clients
        first = {name: part[:1] for name, part in progress.clients.items() if part.dim()}
        _check_state("clients", first, one.clients)
    counts = {name: len(part) for name, part in progress.clients.items()}
    if experiment.ranks is None and set(counts.values()) - {len(clients.ids)}:
        raise ValueError(f"clients: it has {max(counts.values())}, and there are {len(clients.ids)}")
    check_model(experiment, progress.chosen)


def check_model(experiment: Experiment, model: Tensor) -> None:
    """Raise a `ValueError` if a model (d,), or models (k, d), do not fit this experiment."""
    dim = experiment.clients.model.dim
    if model.dim() not in (1, 2) or model.shape[-1] != dim or not model.is_floating_point():
        raise ValueError(f"a model of shape {tuple(model.shape)}, where {dim} numbers are trained")


def _check_state(whose: str, found: State, expected: State) -> None:
    for name in {**expected, **found}:
        if _kind(found, name) != _kind(expected, name):
            raise ValueError(f"{whose}: {name} is {_kind(found, name)} and not {_kind(expected, name)}")


def _kind(state: Mapping[str, Tensor], name: str) -> str:
    return f"{state[name].dtype} {tuple(state[name].shape)}" if name in state else "not there"
