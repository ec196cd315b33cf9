"""An experiment over several ranks: each rank's part of it, what is refused, and checkpoints of the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from trilemma.aggregation import sharded
from trilemma.aggregation.steps.rule import Rule
from trilemma.aggregation.steps.types import Aggregate
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.experiment.resolve import resolve
from trilemma.simulate.engine import Progress
from trilemma.simulate.experiment import Experiment
from trilemma.simulate.ranks import Ranks


@dataclass(frozen=True)
class _Gathering:
    """A rule that takes this rank's columns of the messages and returns the whole aggregate on every rank."""

    rule: Rule
    ranks: Ranks
    dim: int

    @property
    def f(self) -> int:
        return self.rule.f

    @property
    def weights(self) -> tuple[float, ...]:
        return self.rule.weights

    def __call__(self, X: Tensor, key: Key | None = None) -> Aggregate[Tensor]:
        found = sharded(self.rule, X, key)
        return replace(found, value=self.ranks.whole(found.value, self.dim))


def shared_out(experiment: Experiment, ranks: Ranks) -> Experiment:
    """Return this rank's part of an experiment: its clients, and a rule that works with the other ranks."""
    refuse_what_cannot_be_cut(experiment, ranks)
    federated, clients = experiment.clients.data, experiment.clients
    poorest = federated.poorest(experiment.honest)
    dim = experiment.resolved.algorithm.message(clients.model).dim
    rule = cast(Rule, _Gathering(experiment.resolved.rule, ranks, dim))
    resolved = resolve(experiment.config, poorest, clients.model, rule=rule)
    return replace(
        experiment, clients=clients.only(*ranks.share(clients.ids)), resolved=resolved, ranks=ranks
    )


def refuse_what_cannot_be_cut(experiment: Experiment, ranks: Ranks) -> None:
    """Raise a `ConfigError` with all reasons why an experiment cannot run over several processes."""
    said, algorithm = experiment.config, experiment.resolved.algorithm
    model, name = experiment.clients.model, said.algorithm.name
    layout = algorithm.message(model)
    clients = len(experiment.clients.ids)
    reasons = {
        f"{ranks.count} processes for {clients} clients that compute and {layout.dim} numbers in a message: "
        "each needs one of both at least": not ranks.count <= min(clients, layout.dim),
        f"[federation] sampled = {said.federation.sampled}: a process may hold none of the clients that are "
        "heard in a round": said.federation.sampled is not None,
        "[federation] weights: sums over processes are of clients that are alike": bool(
            experiment.resolved.rule.weights
        ),
        f"[attack] {said.attack.name!r} looks at whole messages; what can be cut is decided column by column "
        "(sf, lf; alie, foe and ipm at a given strength)": experiment.attack.craft is not None
        and not experiment.attack.columnwise,
        f"[algorithm] {name!r}: what its clients send travels encoded": layout.codec is not None,
        f"[algorithm] {name!r}: its server asks twice in a round": algorithm.inquiry is not None,
        f"[algorithm] {name!r}: clients have models of their own": experiment.personal,
        f"[algorithm] {name!r} lives with messages that are not finite": algorithm.tolerates_nonfinite,
        f"[aggregation] {said.aggregation.rule!r} looks at whole messages": algorithm.detector is not None
        or bool(algorithm.filter),
        "[aggregation] root: its examples are in one process": bool(said.aggregation.root),
        f"[aggregation] tune = {said.aggregation.tune!r}: clients end with their own": experiment.at_home,
        f"[model] {said.model.name!r}: clients keep running statistics": bool(model.buffers),
    }
    found = [reason for reason, so in reasons.items() if so]
    if found:
        raise ConfigError("; ".join(found) + "; allowed: the same run in one process")


def whole_progress(experiment: Experiment, progress: Progress) -> Progress | None:
    """Return the progress of all clients, as of a single process, on the first rank; None on the others."""
    ranks = experiment.ranks
    if ranks is None:
        return progress
    clients = {name: ranks.at_leader(rows) for name, rows in progress.clients.items()}
    present = {name: rows for name, rows in clients.items() if rows is not None}
    return replace(progress, clients=present) if ranks.leads else None


def own_progress(experiment: Experiment, progress: Progress) -> Progress:
    """Return this rank's part of the progress of all clients."""
    ranks = experiment.ranks
    if ranks is None:
        return progress
    mine = torch.tensor(experiment.clients.ids, device=experiment.device)
    everybody = ranks.gathered(mine).tolist()
    rows = [everybody.index(i) for i in experiment.clients.ids]
    return replace(progress, clients={name: tensor[rows] for name, tensor in progress.clients.items()})
