"""One round of a simulated federation, as a function from progress to progress.

    data → client (gradient, clip, noise, momentum) → [attack] → rule → server update → broadcast

Randomness comes from keys alone, so a round depends on nothing but the progress it starts from: a run that was
interrupted continues exactly as it would have.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trilemma import models
from trilemma.attacks.types import View
from trilemma.learning import Messages
from trilemma.learning.protocol import State
from trilemma.simulate.experiment import Experiment


@dataclass(frozen=True)
class Progress:
    """Where a run stands after `round` rounds: all that is needed to continue.

    `chosen` is the model the run will return: the latest, a sampled iterate, or the running mean.
    """

    round: int
    broadcast: State
    clients: State
    server: State
    chosen: Tensor


class Diverged(ArithmeticError):
    """An honest client's message is not finite any more: the run has no result from this round on."""

    def __init__(self, round_: int) -> None:
        super().__init__(f"honest messages are not finite in round {round_}")
        self.round = round_


@dataclass(frozen=True)
class Evaluation:
    """Test loss and accuracy of the current model."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Record:
    """What is written down about one round. `round` counts finished rounds, from 1."""

    round: int
    epsilon: float
    train_loss: float
    weights: list[float]
    attack_strength: float | None
    report: Mapping[str, Any]
    evaluation: Evaluation | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON values; infinite ε is None."""
        return {
            "round": self.round,
            "loss": self.evaluation.loss if self.evaluation else None,
            "accuracy": self.evaluation.accuracy if self.evaluation else None,
            "epsilon": self.epsilon if self.epsilon != float("inf") else None,
            "train_loss": self.train_loss,
            "attack_strength": self.attack_strength,
            **self.report,
            "weights": self.weights,
            "seconds": dict(self.seconds),
        }


class Stopwatch:
    """Seconds per stage. On CUDA a stage ends when its kernels have."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def start(experiment: Experiment) -> Progress:
    """Return the progress before the first round."""
    beginning = experiment.resolved.algorithm.init(
        experiment.model, experiment.clients.ids, experiment.key.fold("init")
    )
    move = experiment.device
    broadcast = _to(beginning.broadcast, move)
    clients, server = _to(beginning.clients, move), _to(beginning.server, move)
    algorithm = experiment.resolved.algorithm
    return Progress(0, broadcast, clients, server, algorithm.evaluated(broadcast, clients))


def step(experiment: Experiment, progress: Progress) -> tuple[Progress, Record]:
    """Run one round: honest clients, then the attack, then the server."""
    algorithm = experiment.resolved.algorithm
    key = experiment.key.fold("round", progress.round)
    watch = Stopwatch(experiment.device)

    with watch.stage("clients"):
        sent = algorithm.client(progress.broadcast, progress.clients, experiment.clients, progress.round, key)
        if not torch.isfinite(sent.messages.vectors[: experiment.honest]).all():
            raise Diverged(progress.round + 1)
    with watch.stage("attack"):
        messages, strength = attacked(experiment, sent.messages, progress.round)
    with watch.stage("server"):
        done = algorithm.server(messages, progress.server, progress.round, key.fold("server"))

    finished = progress.round + 1
    following = Progress(finished, done.broadcast, sent.state, done.state, progress.chosen)
    following = replace(following, chosen=_chosen(experiment, following))
    honest_loss = sent.report["loss"][: experiment.honest]
    record = Record(
        round=finished,
        epsilon=float(experiment.epsilon_curve[progress.round]),
        train_loss=float(honest_loss.mean()),
        weights=[round(weight, 6) for weight in done.report["weights"].tolist()],
        attack_strength=strength,
        report=_facts(sent.report, experiment.honest),
        seconds={stage: round(spent, 6) for stage, spent in watch.seconds.items()},
    )
    return following, record


def attacked(experiment: Experiment, sent: Messages, round_: int) -> tuple[Messages, float | None]:
    """Put the Byzantine clients' messages in place of what they would have sent."""
    byzantine = experiment.config.federation.byzantine
    craft = experiment.attack.craft
    if byzantine == 0 or craft is None:
        return sent, None
    honest, own = sent.vectors[: experiment.honest], sent.vectors[experiment.honest :]
    view = View(
        honest=honest,
        own=own if len(own) else None,
        byzantine=byzantine,
        target=experiment.resolved.rule,
        round=round_,
        key=experiment.key.fold("round", round_, "attack"),
    )
    crafted = craft(view)
    return Messages(torch.cat([honest, crafted.messages])), crafted.strength


def evaluate(experiment: Experiment, params: Tensor) -> Evaluation:
    """Score `params` on the test set."""
    x, y = experiment.test_set()
    result = models.evaluate(experiment.model, params, x, y)
    return Evaluation(float(result.loss), float(result.accuracy))


def _chosen(experiment: Experiment, progress: Progress) -> Tensor:
    latest = experiment.resolved.algorithm.evaluated(progress.broadcast, progress.clients)
    match experiment.config.run.returned:
        case "last":
            return latest
        case "average":
            return progress.chosen + (latest - progress.chosen) / progress.round
        case "sampled":
            rounds = experiment.config.run.rounds
            picked = int(experiment.key.fold("returned").numpy().integers(1, rounds + 1))
            return latest if progress.round <= picked else progress.chosen


def _facts(report: Mapping[str, Any], honest: int) -> dict[str, Any]:
    """Average a client report over the honest clients."""
    return {
        name: float(value[:honest].float().mean())
        for name, value in report.items()
        if isinstance(value, Tensor) and name != "loss"
    }


def _to(state: State, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in state.items()}
