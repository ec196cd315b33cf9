"""One round of a simulated federation, as a function from progress to progress.

    data → client (gradient, clip, noise, momentum) → [attack] → rule → server update → broadcast

Randomness comes from keys alone, so a round depends on nothing but the progress it starts from: a run that
was interrupted continues exactly as it would have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trilemma.attacks.types import View
from trilemma.learning import ClientStep, Messages
from trilemma.learning.protocol import State
from trilemma.learning.rounds import returned_model
from trilemma.records import Record
from trilemma.simulate.experiment import Experiment
from trilemma.stopwatch import Stopwatch


class Diverged(ArithmeticError):
    """An honest client's training is not finite any more: the run has no result from this round on."""

    def __init__(self, round_: int) -> None:
        super().__init__(f"honest training is not finite in round {round_}")
        self.round = round_


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


def start(experiment: Experiment) -> Progress:
    """Return the progress before the first round."""
    beginning = experiment.resolved.algorithm.init(
        experiment.clients.model, experiment.clients.ids, experiment.key.fold("init")
    )
    progress = Progress(
        round=0,
        broadcast=_to(beginning.broadcast, experiment.device),
        clients=_to(beginning.clients, experiment.device),
        server=_to(beginning.server, experiment.device),
        chosen=torch.empty(0),
    )
    return replace(progress, chosen=latest_model(experiment, progress))


def step(experiment: Experiment, progress: Progress) -> tuple[Progress, Record]:
    """Run one round: clients, then the attack, then the server."""
    algorithm = experiment.resolved.algorithm
    key = experiment.key.fold("round", progress.round)
    heard = experiment.sampled(progress.round)
    watch = Stopwatch(experiment.device)

    with watch.stage("clients"), experiment.precision():
        stepped, sent = _clients(experiment, progress, heard)
        honest = [row for row, i in enumerate(stepped) if i not in experiment.byzantine]
        _check_finite(experiment, progress.round, sent, honest)
    with watch.stage("attack"):
        messages, strength = _attacked(experiment, progress.round, stepped, sent.messages, heard)
    with watch.stage("server"):
        done = algorithm.server(messages, progress.server, progress.round, key.fold("server"))

    following = Progress(
        round=progress.round + 1,
        broadcast=done.broadcast,
        clients=_merged(experiment, progress.clients, stepped, sent.state),
        server=done.state,
        chosen=progress.chosen,
    )
    following = replace(following, chosen=_chosen(experiment, following))
    weights = zip(heard, done.report["weights"].tolist(), strict=True)
    record = Record(
        round=following.round,
        epsilon=float(experiment.epsilon_curve[progress.round]),
        train_loss=float(sent.report["loss"][honest].mean()) if honest else None,
        weights={i: round(weight, 6) for i, weight in weights},
        attack_strength=strength,
        facts=_facts(sent, honest) | _wire(experiment, progress.broadcast, messages),
        seconds=watch.take(),
    )
    return following, record


def latest_model(experiment: Experiment, progress: Progress) -> Tensor:
    """Return the parameters the algorithm is scored by: (d,), or (k, d) for the clients that compute."""
    key = experiment.key.fold("evaluate", progress.round)
    return experiment.resolved.algorithm.evaluated(
        progress.broadcast, progress.clients, experiment.clients, key
    )


def _clients(
    experiment: Experiment, progress: Progress, heard: tuple[int, ...]
) -> tuple[tuple[int, ...], ClientStep]:
    """Step the clients that train this round; return who they are and what they sent."""
    algorithm, everyone = experiment.resolved.algorithm, experiment.clients
    key = experiment.key.fold("round", progress.round)
    stepped = everyone.ids
    if not algorithm.everyone_trains and len(heard) < experiment.config.federation.clients:
        stepped = tuple(i for i in everyone.ids if i in heard)
    if stepped == everyone.ids:
        return stepped, algorithm.client(progress.broadcast, progress.clients, everyone, progress.round, key)
    rows = [everyone.ids.index(i) for i in stepped]
    state = {name: tensor[rows] for name, tensor in progress.clients.items()}
    return stepped, algorithm.client(progress.broadcast, state, everyone.only(*stepped), progress.round, key)


def _merged(experiment: Experiment, before: State, stepped: tuple[int, ...], after: State) -> State:
    """Put the new state of the clients that trained among those that did not."""
    if stepped == experiment.clients.ids:
        return after
    rows = torch.tensor([experiment.clients.ids.index(i) for i in stepped], device=experiment.device)
    return {name: tensor.index_copy(0, rows, after[name]) for name, tensor in before.items()}


def _attacked(
    experiment: Experiment, round_: int, stepped: tuple[int, ...], sent: Messages, heard: tuple[int, ...]
) -> tuple[Messages, float | None]:
    """Select the messages the server hears, the Byzantine ones replaced by what the attack makes of them."""
    liars = tuple(i for i in heard if i in experiment.byzantine)
    craft = experiment.attack.craft
    row = {i: index for index, i in enumerate(stepped)}
    if not liars or craft is None:
        return _rows(sent, [row[i] for i in heard]), None
    honest = _rows(sent, [row[i] for i in heard if i not in liars])
    own = _rows(sent, [row[i] for i in liars]).vectors if liars[0] in row else None
    positions = tuple(heard.index(i) for i in liars)
    last = positions == tuple(range(len(heard) - len(liars), len(heard)))
    view = View(
        honest=honest.vectors,
        own=own,
        byzantine=len(liars),
        target=experiment.resolved.rule,
        round=round_,
        key=experiment.key.fold("round", round_, "attack"),
        positions=None if last else positions,
    )
    crafted = craft(view)
    stack = torch.cat([honest.vectors, crafted.messages]) if last else view.stack(crafted.messages)
    return Messages(stack), crafted.strength


def _rows(sent: Messages, rows: list[int]) -> Messages:
    if rows == list(range(len(sent.vectors))):
        return sent
    return Messages(
        sent.vectors[rows],
        None if sent.scalars is None else sent.scalars[rows],
        None if sent.bytes is None else sent.bytes[rows],
    )


def _check_finite(experiment: Experiment, round_: int, sent: ClientStep, honest: list[int]) -> None:
    finite = bool(torch.isfinite(sent.report["loss"][honest]).all())
    if finite and not experiment.resolved.algorithm.tolerates_nonfinite:
        finite = bool(torch.isfinite(_rows(sent.messages, honest).vectors).all())
    if not finite:
        raise Diverged(round_ + 1)


def _chosen(experiment: Experiment, progress: Progress) -> Tensor:
    latest = latest_model(experiment, progress)
    run = experiment.config.run
    return returned_model(run.returned, progress.chosen, latest, progress.round, run.rounds, experiment.key)


def _facts(sent: ClientStep, honest: list[int]) -> dict[str, float]:
    """Average what clients report over the honest ones."""
    return {
        name: float(value[honest].float().mean())
        for name, value in sent.report.items()
        if isinstance(value, Tensor) and name != "loss" and honest
    }


def _wire(experiment: Experiment, broadcast: State, messages: Messages) -> dict[str, float]:
    """Count what travels in a round, in scalars and in bytes, to and from all clients that take part."""
    heard, dim = messages.vectors.shape
    algorithm = experiment.resolved.algorithm
    everyone = algorithm.everyone_trains or algorithm.everyone_listens
    listeners = experiment.config.federation.clients if everyone else heard
    numbers = sum(tensor.numel() for tensor in broadcast.values())
    down, received = (numbers, 4 * numbers) if algorithm.downlink is None else algorithm.downlink(broadcast)
    scalars = heard * dim if messages.scalars is None else float(messages.scalars.sum())
    sent = 4 * heard * dim if messages.bytes is None else float(messages.bytes.sum())
    return {
        "up_scalars": scalars,
        "up_bytes": sent,
        "down_scalars": listeners * down,
        "down_bytes": listeners * received,
    }


def _to(state: State, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in state.items()}
