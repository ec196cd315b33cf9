"""What liars know in addition to a round's messages: the defence's state, and what would do most harm.

Liars know everything but honest secrets, hence also the honest clients' data. Everything is computed only
when an attack asks for it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from trilemma.attacks.types import View
from trilemma.learning.messages import side_by_side
from trilemma.learning.steps.trace import Trace
from trilemma.privacy import Noiseless
from trilemma.privacy.types import NoiseLaw
from trilemma.simulate.engine import Moment
from trilemma.simulate.experiment import Experiment
from trilemma_lab.adversary.ahead import Ahead, ProgressSeen
from trilemma_lab.adversary.going_on import AheadGoingOn
from trilemma_lab.adversary.informed import Informed, Room
from trilemma_lab.adversary.lookahead import Lookahead


def informed(moment: Moment, view: View) -> Informed:
    """Return the view with what attackers know in addition to the messages."""
    experiment, progress, sent, heard = moment.experiment, moment.progress, moment.sent, moment.participating
    algorithm, round_, lookahead = experiment.resolved.algorithm, progress.round, None
    known = Informed.of(view)
    if algorithm.detector is not None:
        everything = sent if view.own is None else sent.rows(_rows_of(moment.stepped, heard))
        lookahead = cache(
            partial(Lookahead.of, algorithm.detector, progress.server, everything.vectors, heard, round_)
        )
        known = replace(known, defence=None if view.own is None else lookahead)
    if algorithm.filter and experiment.root is not None:
        known = replace(known, trusted=partial(_trusted, experiment, progress))
    known = replace(known, truth=partial(_truth, experiment, progress, heard, view.honest))
    known = replace(known, room=partial(_room, experiment, progress, view.honest.shape[1]))
    model, trace = experiment.clients.model, algorithm.trace
    moved = None if trace is None else progress.broadcast[trace.model]
    if moved is not None and moved.shape == (model.dim,) and view.own is not None and not model.buffers:
        ahead = Ahead(experiment, progress, sent.rows(_rows_of(moment.stepped, heard)), heard, lookahead)
        known = replace(known, uphill=ahead.uphill, unshown=ahead.unshown, poisoned=ahead.poisoned)
        known = replace(known, backdoored=None if experiment.attack.backdoor is None else ahead.backdoored)
        known = replace(known, errors=ahead.errors, mistaken=ahead.mistaken)
        if (later := AheadGoingOn.of(ahead)) is not None:
            known = replace(known, unshown_errors=later.errors, unshown_mistaken=later.mistaken)
    return known


def _rows_of(everybody: tuple[int, ...], clients: tuple[int, ...]) -> list[int]:
    """Return the places of `clients` in `everybody`."""
    place = {client: row for row, client in enumerate(everybody)}
    return [place[client] for client in clients]


def _room(experiment: Experiment, progress: ProgressSeen, length: int) -> Room:
    """Return how long a contribution may be in a round, and what a message holds of it."""
    algorithm, trace = experiment.resolved.algorithm, experiment.resolved.algorithm.trace
    clip = None if algorithm.release is None else algorithm.release.clip
    counted = "clip" in progress.broadcast  # it follows a quantile, and messages count in it
    clip = None if clip is None or math.isinf(clip) else clip
    if trace is None:
        return Room(length - counted, clip)
    held = 0.0
    for round_ in range(progress.round + 1):
        held = trace.keeps(round_) * held + trace.adds(round_)
    return Room(length - counted, clip, held, trace.adds(progress.round))


def _truth(experiment: Experiment, progress: ProgressSeen, heard: tuple[int, ...], sent: Tensor) -> Tensor:
    """Return the honest clients' mean contribution of this round without noise (d,).

    `sent` (h, d) are their messages. If these are a contribution, noise and a multiple of the last message,
    the last two are subtracted. Otherwise the clients compute once more, without noise.
    """
    algorithm, round_ = experiment.resolved.algorithm, progress.round
    honest = tuple(i for i in heard if i not in experiment.byzantine)
    trace, release = algorithm.trace, algorithm.release
    known = trace is not None and (trace.keeps(round_) == 0 or "momentum" in progress.clients)
    known = known and "clip" not in progress.broadcast  # of counts no message remembers any
    known = known and algorithm.message(experiment.clients.model).codec is None  # a grid draws other noise
    if trace is not None and known and release is not None and len(sent) == len(honest):
        return _noise_subtracted(experiment, progress, honest, sent, trace, release.law)
    return _computed_again(experiment, progress, honest)


def _noise_subtracted(
    experiment: Experiment,
    progress: ProgressSeen,
    honest: tuple[int, ...],
    sent: Tensor,
    trace: Trace,
    law: NoiseLaw,
) -> Tensor:
    """Return the mean contribution (d,): the mean message, less the last messages' share and the noise."""
    round_, rows = progress.round, _rows_of(experiment.clients.ids, honest)
    source = experiment.clients.among(experiment.members(progress.server)).noise
    drawn = source.draw(law, honest, sent.shape[1], round_, sent.device).mean(0)
    mean = trace.vectors(sent, progress.broadcast[trace.model]).mean(0)
    if "momentum" in progress.clients:
        last = progress.clients["momentum"][side_by_side(rows) or rows]
        mean = mean - trace.keeps(round_) * last.mean(0)
    return mean / trace.adds(round_) - drawn


def _computed_again(experiment: Experiment, progress: ProgressSeen, honest: tuple[int, ...]) -> Tensor:
    """Return the mean contribution (d,) of honest clients that step once more, without noise."""
    algorithm, round_, trace = (
        experiment.resolved.algorithm,
        progress.round,
        experiment.resolved.algorithm.trace,
    )
    rows = _rows_of(experiment.clients.ids, honest)
    state = {name: tensor[rows] for name, tensor in progress.clients.items()}
    if trace is not None and "momentum" in state:
        state["momentum"] = torch.zeros_like(state["momentum"])
    quiet = replace(experiment.clients.only(*honest), noise=Noiseless())
    key = experiment.key.fold("round", round_)
    messages = algorithm.client(progress.broadcast, state, quiet, round_, key).messages.vectors
    if trace is None:
        return messages.mean(0)
    return trace.vectors(messages, progress.broadcast[trace.model]).mean(0) / trace.adds(round_)


def _trusted(experiment: Experiment, progress: ProgressSeen) -> Tensor:
    """Return what a client with the server's public examples would send (d,), less the model."""
    algorithm, round_, root = experiment.resolved.algorithm, progress.round, experiment.root
    assert root is not None
    assert algorithm.trace is not None
    start = algorithm.init(root.model, root.ids, experiment.key.fold("init")).clients
    key = experiment.key.fold("round", round_, "trusted")
    state = {name: part.to(experiment.device) for name, part in start.items()}
    sent = algorithm.client(progress.broadcast, state, root, round_, key).messages.vectors
    return algorithm.trace.vectors(sent, progress.broadcast[algorithm.trace.model])[0]
