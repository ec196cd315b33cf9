"""Where a round would lead, and what liars should send to make the model err most.

Liars know the honest clients' data. Everything is computed only when it is asked for.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from trilemma import models
from trilemma.attacks.labels import flip
from trilemma.base.keys import Key
from trilemma.data.types import Batch, each
from trilemma.learning import Messages
from trilemma.learning.defences.evidence.history import PREFIX
from trilemma.learning.protocol import State
from trilemma.learning.steps.privatise import client_keys
from trilemma.learning.steps.trace import Trace
from trilemma.learning.steps.tuning import unseen
from trilemma.models.engines import replay
from trilemma.models.types import Model
from trilemma.simulate.experiment import Experiment, SimulatedClients
from trilemma_lab.adversary.lookahead import Lookahead

LOOKED_AT = 50
"""How many examples of every honest client liars use to compute losses and errors."""

LENGTHENED = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Multiples of the model's move that are tried for the least loss."""

ENOUGH = 1000
"""About so many examples are enough to tell these multiples apart; of more, some are left out."""

LOOKS = 24
"""Evaluations of errors and their gradient in a climb; 40 find hardly more."""

MORE_LOOKS = 8
"""The same for a climb that starts from an earlier lie."""


SHOWN = 8
"""How many of the clients that tune the model on their own data liars take into account."""


class ProgressSeen(Protocol):
    """The part of `engine.Progress` that liars read."""

    @property
    def round(self) -> int:
        """How many rounds are finished."""

    @property
    def broadcast(self) -> State:
        """The last broadcast."""

    @property
    def clients(self) -> State:
        """The clients' state."""

    @property
    def server(self) -> State:
        """The server's state."""


@dataclass(frozen=True)
class Ahead:
    """The model to which a round would lead, and honest clients' examples on which liars evaluate it.

    Clipping may leave the model's move far shorter than its best multiple, and its loss then says little
    about its errors. So losses and errors are computed for the multiple of the move with the least loss.

    `sent` are the messages of the clients `participating`, as the protocol computed them. `lookahead` returns
    the lookahead of a defended server on them; None: the server has no memory.
    """

    experiment: Experiment
    progress: ProgressSeen
    sent: Messages
    participating: tuple[int, ...]
    lookahead: Callable[[], Lookahead] | None = None

    @cached_property
    def trace(self) -> Trace:
        """How messages move the model."""
        trace = self.experiment.resolved.algorithm.trace
        assert trace is not None
        return trace

    @cached_property
    def key(self) -> Key:
        """The liars' own key."""
        return self.experiment.key.fold("round", self.progress.round, "uphill")

    @cached_property
    def honest(self) -> SimulatedClients:
        """The honest clients that are heard."""
        return self.experiment.clients.only(
            *(i for i in self.participating if i not in self.experiment.byzantine)
        )

    @cached_property
    def after(self) -> Tensor:
        """The model to which the round would lead without a lie (d,)."""
        move = None if self.lookahead is None else self.lookahead().destination()
        return self._rehearsed(self.sent) if move is None else self.start + move

    def _rehearsed(self, sent: Messages) -> Tensor:
        """Return the model to which messages would lead (d,); computed once for the same tensor."""
        asked = id(sent.vectors), sent.vectors._version  # the version changes when the tensor is written to
        known = self._known.get(asked)
        if known is not None and known[0]() is sent.vectors:
            return known[1]
        algorithm, round_ = self.experiment.resolved.algorithm, self.progress.round
        key = self.experiment.key.fold("round", round_, "rehearsal")
        messages = replace(sent, senders=self.participating)
        led = algorithm.server(messages, self.progress.server, round_, key).broadcast[self.trace.model]
        self._known[asked] = weakref.ref(sent.vectors), led
        return led

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[weakref.ref[Tensor], Tensor]]:
        """Rehearsed messages, by weak reference, and the models to which they lead."""
        return {}

    @cached_property
    def start(self) -> Tensor:
        """The model from which moves are counted (d,): the broadcast, or θ_0 for a defended server."""
        if self.experiment.resolved.algorithm.detector is None:
            return self.progress.broadcast[self.trace.model]
        return self.progress.server[f"{PREFIX}origin"]

    @cached_property
    def batch(self) -> Batch:
        """Some examples of every honest client, as one batch, so that its gradient is the clients' mean."""
        size = min(LOOKED_AT, int(self.honest.data.sizes[list(self.honest.ids)].min()))
        drawn = self.honest.sample(size, self.key)
        weight = None if drawn.weight is None else drawn.weight.flatten()[None] / len(drawn.weight)
        x = each(drawn.x, lambda part: part.flatten(0, 1)[None])
        return Batch(x, drawn.y.flatten(0, 1)[None], weight)

    @cached_property
    def lengthened(self) -> float:
        """The multiple of the round's move with the least loss."""
        return self._best_multiple(self.after - self.start)

    def _best_multiple(self, move: Tensor) -> float:
        """Return the multiple of a move (d,) with the least loss."""
        tried = torch.stack([self.start + scale * move for scale in LENGTHENED])
        x, weight = each(self.batch.x, _some), self.batch.weight
        shares, y = None if weight is None else _some(weight), _some(self.batch.y)
        model = self.honest.model
        return LENGTHENED[int(models.evaluate(model, tried, x, y, shares, per_client=False).loss.argmin())]

    def steepest(self, params: Tensor, weight: Tensor | None) -> Tensor:
        """Return the gradient (d,) of the examples' weighted loss at `params`."""
        return self._gradient(params, replace(self.batch, weight=weight))

    def _gradient(self, params: Tensor, batch: Batch) -> Tensor:
        """Return the gradient (d,) of a batch's loss at `params`."""
        keys = client_keys(self.honest.only(self.honest.ids[0]), self.key)
        return replay.gradients(self.honest.model, params, batch, keys=keys).value[0]

    @property
    def sense(self) -> float:
        """The sign of the step: −1 if messages are subtracted from the model."""
        return math.copysign(1.0, self.trace.step(self.progress.round))

    def uphill(self) -> Tensor:
        """Return what to add to messages (d,) so that the honest loss rises most."""
        return self.sense * self.steepest(self._destined, self.batch.weight)

    @property
    def _destined(self) -> Tensor:
        """The model at which losses are computed (d,): the round's move, at its best multiple."""
        return self.start + self.lengthened * (self.after - self.start)

    def poisoned(self) -> Tensor:
        """Return what to add to messages (d,) so that the loss of flipped labels falls most."""
        flipped = flip(self.batch.y, self._classes, self.key)
        return -self.sense * self._gradient(self._destined, replace(self.batch, y=flipped))

    def backdoored(self) -> Tensor:
        """Return the same for examples with the attack's mark, all of them of its target class."""
        backdoor = self.experiment.attack.backdoor
        assert backdoor is not None
        marked = each(self.batch.x, lambda part: backdoor.marked(part, lead=2))
        batch = replace(self.batch, x=marked, y=torch.full_like(self.batch.y, backdoor.target))
        return -self.sense * self._gradient(self._destined, batch)

    @property
    def _classes(self) -> int:
        return self.honest.data.dataset.needs_classes(f"attack {self.experiment.attack.name!r}")

    def unshown(self) -> Tensor:
        """Return the same for the loss after the server or clients have tuned the model."""
        pushes = []
        for owner in self.shown():
            tuned = self.experiment.tuned(owner, self.after)
            pushes.append(unseen(owner, tuned, self.steepest(tuned.params, self.batch.weight)))
        return self.sense * torch.stack(pushes).mean(0) if pushes else self.uphill()

    def shown(self) -> Sequence[SimulatedClients]:
        """Return at most `SHOWN` owners that tune the model after this round, without liars."""
        going_on = self.experiment.going_on(self.progress.round + 1)
        return [owner for owner in going_on if not {*owner.ids} & {*self.experiment.byzantine}][:SHOWN]

    def errors(self, far: float, lie: tuple[Tensor, Tensor] | None = None, sharper: float = 1.0) -> Tensor:
        """Return the direction (d,) in which a push of the aggregate by `far` makes most examples mistaken.

        Maximised is the mean of 1 − p, where p = exp(−loss) is the probability that the model gives the right
        answer. (The loss itself would rise most by examples that are mistaken anyway.) It is climbed by
        L-BFGS on a sphere whose radius is the move that `far` causes.

        Without a `lie` the sphere's centre is where the round would lead. A `lie` is the direction of an
        earlier lie and the messages of all clients (k, d) with it. The centre is then where these would lead
        without the push along the direction, which differs, because turned noise has changed and the rule
        weighs messages differently. The climb starts at the earlier lie's direction.

        p belongs to the multiple of the model's move with the least loss, times `sharper`.
        """
        move, step = self.after - self.start, self.trace.step(self.progress.round)
        way = None
        if lie is not None:
            way = self.sense * _unit(lie[0]).to(move)
            landed = self._rehearsed(replace(self.sent, vectors=lie[1])) - self.start
            move = landed - ((landed - move) @ way) * way
        return self.sense * self._climbed(move, far * abs(step), way, sharper)

    def mistaken(self, vectors: Tensor, sharper: float = 1.0) -> float:
        """Return the mean of 1 − p at the model to which the messages `vectors` (k, d) would lead."""
        move = self._rehearsed(replace(self.sent, vectors=vectors)) - self.start
        return self._mistaken(move, sharper)[1]

    def _mistaken(self, move: Tensor, sharper: float) -> tuple[Tensor, float]:
        """Return p times every example's share, and the mean of 1 − p, for a move (d,) of the model."""
        return self._errors_at(self.start + sharper * self.lengthened * move)

    def _errors_at(self, params: Tensor) -> tuple[Tensor, float]:
        """Return p times every example's share, and the mean of 1 − p, for a model (d,)."""
        model, batch = self.honest.model, self.batch
        x = each(batch.x, lambda part: part[0])
        likely = torch.exp(-model.loss(models.outputs(model, params, x)[None], batch.y))
        shares = torch.ones_like(likely) if batch.weight is None else batch.weight
        likely = likely * shares / shares.sum()
        return likely, float(1 - likely.sum())

    def _slope(self, move: Tensor, sharper: float) -> tuple[float, Tensor]:
        """Return the mean of 1 − p for a move (d,) of the model, and its gradient (d,)."""
        model, multiple = self.honest.model, sharper * self.lengthened
        if model.engine is not None:  # such a model drops units in training but not in scoring
            likely, mistaken = self._mistaken(move, sharper)
            return mistaken, multiple * self.steepest(self.start + multiple * move, likely)
        weight = self.batch.weight
        shares = None if weight is None else weight / weight.sum()
        batch = replace(self.batch, weight=shares)
        found = replay.gradients(_with_errors_as_loss(model), self.start + multiple * move, batch)
        return float(found.loss[0]), multiple * found.value[0]

    def _climbed(self, move: Tensor, radius: float, start: Tensor | None, sharper: float) -> Tensor:
        """Return the unit vector (d,) along which a push by `radius`, after `move`, gives most errors."""
        way = _unit(self._slope(move, sharper)[1] if start is None else start).double()
        most, best = -math.inf, way
        free = way.clone().requires_grad_()
        looks = LOOKS if start is None else MORE_LOOKS
        search = torch.optim.LBFGS(
            [free], max_iter=looks, max_eval=looks, line_search_fn="strong_wolfe", tolerance_change=0.0
        )

        def descend() -> float:
            nonlocal most, best
            at = _unit(free.detach())
            errors, steepest = self._slope(move + radius * at.to(move), sharper)
            if not (math.isfinite(errors) and bool(steepest.isfinite().all())):
                free.grad = torch.zeros_like(free)  # the line search must not see NaN or infinity
                return -max(most, 0.0)
            if errors > most:
                most, best = errors, at
            along, length = radius * steepest.to(at), torch.linalg.vector_norm(free.detach())
            free.grad = -(along - (along @ at) * at) / length.clamp(min=1e-30)
            return -errors

        search.step(descend)  # type: ignore[no-untyped-call]
        return best.to(move)


@lru_cache(maxsize=4)
def _with_errors_as_loss(model: Model) -> Model:
    """Return the model with the loss 1 − p, p = exp(−loss), so that one pass gives it and its gradient."""

    def erring(outputs: Tensor, labels: Tensor) -> Tensor:
        return -torch.expm1(-model.loss(outputs, labels))

    return replace(model, loss=erring)


def _some(part: Tensor) -> Tensor:
    """Return `ENOUGH` examples, or up to twice as many, evenly out of a batch's part (1, n, …)."""
    return part[0, :: max(1, part.shape[1] // ENOUGH)].contiguous()


def _unit(vector: Tensor) -> Tensor:
    """Return the vector (d,) scaled to length 1; zeros if it is zero or not finite."""
    found: Tensor = vector / torch.linalg.vector_norm(vector).clamp(min=1e-30)
    return found if bool(found.isfinite().all()) else torch.zeros_like(found)
