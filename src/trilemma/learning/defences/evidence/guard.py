"""An algorithm's server with the evidence stage before its rule.

In every round, in addition to what the algorithm's own server does:

    S_i ← S_i + step · x_i          what client i alone would have moved the model by (`trace`)
    expelled ← convict(looks)       for good; the remaining clients share secrets anew (`detector`)
    a = R(x) + xᵀ y                 y = correct(x): the round's aggregate, set right along visible directions
    moved ← moved + step · a − what is undone
    model = θ_0 + moved + Sᵀ y      y = correct(S): the same over all rounds, when the sums are looked at

**Cost.** The Gram matrix of the messages is computed once, for the look and for the rule, and also shows
which messages are not finite. Sums are updated in one pass, in reused memory (`spare`). Their Gram matrix is
computed only when a look is due (`schedule`). Products of long messages are float32: the error is 10⁻⁷ where
noise leaves 1/√d undecided. Between looks the model moves by the round's aggregate alone. Other passes over
all coordinates are made only if a direction stands out.

A GPU and its host work in parallel. While the GPU measures the messages, the host adds them to the history as
if all were finite; while it measures the sums, the rule weighs all messages. Both are repeated if somebody is
left out, which is rare.

**State.** One number per client and coordinate, and two vectors. In the first `wait` rounds the model stays
at θ_0; nothing is lost, since the sums go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from trilemma import aggregation
from trilemma.aggregation import mixings
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.base.options import LARGEST
from trilemma.learning.defences.evidence.conviction import Expulsion, clients_of
from trilemma.learning.defences.evidence.detector import Detector, Look, combined
from trilemma.learning.defences.evidence.history import ClientHistory
from trilemma.learning.defences.evidence.schedule import PACE
from trilemma.learning.defences.stage import Stage, check_one_vector, expecting
from trilemma.learning.messages import Messages
from trilemma.learning.protocol import Algorithm, Report, ServerStep, Start, State
from trilemma.learning.settings import Setup
from trilemma.learning.steps.total import all_finite
from trilemma.learning.steps.trace import Array, Law, Places, Trace
from trilemma.models.types import Model
from trilemma.storage.mapped import beside

SINGLE = 1 << 16
"""Messages of at least so many numbers are measured in float32; for shorter ones float64 costs little."""


@mixings.register("evidence")
class Evidence(Stage):
    """Expel clients whose messages, over rounds, are not clipped contributions plus the agreed noise.

    Needs an algorithm that clips and adds noise; without noise it does nothing. In a single round messages
    pass through unchanged.

    >>> from trilemma import aggregation as agg
    >>> agg.parse("evidence(1e-4, wait=5)+caf", f=1).name
    'evidence(alarm=0.0001,wait=5)+caf'
    """

    alarm: float = Field(
        default=1e-6, gt=0, lt=1, description="probability that a run expels an honest client"
    )
    wait: int = Field(default=0, ge=0, description="rounds in which the model stays where it is")
    undo: Literal[0, 1] = Field(default=1, description="1: take back what expelled clients did")
    correct: Literal[0, 1] = Field(default=1, description="1: set the model right along visible directions")
    pace: float = Field(
        default=PACE,
        ge=1,
        description="sums are looked at in 8 rounds, then in each that is so many times later; 1: in all",
    )

    def extended(self, build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
        """See `Stage.extended`. Without noise in messages the server stays as it is."""
        algorithm = build(setup)
        if setup.release is None or setup.release.law.silent:
            return algorithm
        return _guarded(self, algorithm, expecting(build, setup), setup)


def _guarded(
    settings: Evidence, algorithm: Algorithm, inner: Callable[[int], Algorithm], setup: Setup
) -> Algorithm:
    """Return the algorithm with evidence before the rule of `inner`, which expects so many liars."""
    trace = _traceable(algorithm, setup)
    detector = Detector(settings, setup, trace)

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        start = algorithm.init(model, ids, key)
        check_one_vector("evidence", algorithm, start)
        history = ClientHistory.empty(setup.clients, setup.rounds, start.broadcast[trace.model])
        return replace(start, server={**start.server, **history.state()})

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        model = state[trace.model]

        def rule(sound: Messages, history: ClientHistory) -> ServerStep:
            expecting_liars = inner(detector.expected(len(sound.vectors), history))
            return expecting_liars.server(sound, {trace.model: model}, round_, key)

        heard = _heard(detector, state, messages, round_)
        judged = _judged(detector, heard, rule)
        step = _aggregated(detector, heard, judged, model, rule)
        stepped, history = model + step.change, _written_down(judged, heard, step)
        after = _model_after(detector, history, judged, stepped, round_)
        told = {**step.report, "weights": step.weights, "expelled": tuple(judged.expelled)}
        return ServerStep({trace.model: after}, {trace.model: after, **history.state()}, told)

    def members(state: State) -> tuple[int, ...]:
        return tuple(int(i) for i in ClientHistory.read(state).staying)

    return replace(algorithm, init=init, server=server, members=members, detector=detector)


def _traceable(algorithm: Algorithm, setup: Setup) -> Trace:
    """Return the algorithm's trace; refuse algorithms and releases that the evidence stage cannot judge."""
    assert setup.release is not None
    if algorithm.trace is None:
        raise ConfigError(
            f"evidence needs messages that are sums of clipped contributions and known noise; those of "
            f"{algorithm.name} are not, or not only; allowed: a rule without evidence"
        )
    if setup.release.sampling.scheme == "poisson":
        raise ConfigError(
            "evidence needs a bound on every contribution; a Poisson batch has none on its size; "
            "allowed: algorithm.sampling = 'without-replacement'"
        )
    return algorithm.trace


# --- the steps of a round -----------------------------------------------------------------------------------


Served = Callable[[Messages, ClientHistory], ServerStep]
"""(finite messages of members, history) -> the step of the algorithm's own server."""


@dataclass(frozen=True)
class _Heard:
    """The messages of a round, those that are not finite (unsound) apart from the others (sound).

    Attributes:
        senders: Who sent a message in this round.
        sound: The k messages that are finite.
        rows: Their places among `senders` (k,).
        vectors: The sound messages (k, d), less the model if they contain it.
        unsound: The expulsions of clients whose message is not finite.
        before: The history before the round.
        history: The history with the round added.
        law: The law of the sound messages.
        sums: Waits for the Gram matrix of the history's sums; None if they are not looked at.
    """

    round: int
    senders: tuple[int, ...]
    sound: Messages
    rows: Places
    vectors: Tensor
    unsound: list[Expulsion]
    before: ClientHistory
    history: ClientHistory
    law: Law
    sums: Callable[[], Tensor] | None

    @property
    def places(self) -> Places:
        """The clients whose messages are sound (k,)."""
        found: Places = np.array(self.senders, dtype=np.int64)[self.rows]
        return found

    @property
    def gram(self) -> Array:
        """The Gram matrix of the vectors (k, k)."""
        if not len(self.vectors):
            return np.zeros((0, 0))
        known = self.sound.geometry
        return (aggregation.gram(self.vectors) if known is None else known.gram).numpy()


def _heard(detector: Detector, state: State, messages: Messages, round_: int) -> _Heard:
    """Add the messages to the history, except those that are not finite."""
    measured = _measuring(messages, detector.trace, detector.trace.step(round_))
    senders, model = messages.whose(range(detector.setup.clients)), state[detector.trace.model]
    before = ClientHistory.read(state).reaching(max((*senders, *messages.sharing), default=-1) + 1)
    sharing = np.array(messages.sharing, dtype=np.int64) if messages.sharing else before.staying

    def filed(sound: Messages, finite: NDArray[np.bool_]) -> _Heard:
        rows, vectors = np.flatnonzero(finite), detector.trace.vectors(sound.vectors, model)
        # An honest client never sends what is not finite.
        unsound = [Expulsion(senders[row], "not finite") for row in np.flatnonzero(~finite)]
        places = np.array(senders, dtype=np.int64)[rows]
        history = detector.updated(before.expelling(unsound), vectors, places, round_, sharing)
        sums = aggregation.gram_later(history.sums) if detector.due(history, round_) else None
        law = detector.law_of_messages(history, places)
        return _Heard(round_, senders, sound, rows, vectors, unsound, before, history, law, sums)

    heard = filed(messages, np.ones(len(senders), bool))  # meanwhile a GPU measures them
    messages, finite = measured()
    if finite.all():
        return replace(heard, sound=messages)
    del heard
    return filed(messages.rows(np.flatnonzero(finite).tolist()), finite)


@dataclass(frozen=True)
class _Judged:
    """The judgement of a round: who is `expelled`, and the `history` and the looks without them.

    `sums` is None if they were not looked at. `undone` (d,) is what is subtracted from the model's move for
    the expelled, None if nobody is expelled. `done` is the rule's step on all sound messages, if it was
    already computed and still holds.
    """

    history: ClientHistory
    messages: Look
    sums: Look | None
    expelled: list[Expulsion]
    undone: Tensor | None
    done: ServerStep | None


def _judged(detector: Detector, heard: _Heard, rule: Served) -> _Judged:
    """Look at messages and, when due, at sums; expel clients that are proved to lie."""
    history, before = heard.history, heard.before
    messages = detector.messages(history, heard.gram, heard.places, heard.law)
    sums = done = None
    if heard.sums is not None:
        messages.directions(detector.liars(history))  # is remembered; computed while a GPU measures the sums
        if history.sums.is_cuda and len(heard.places) and not detector.convict(None, messages, history):
            done = rule(heard.sound, history)  # likewise
        sums = detector.sums(history, heard.sums().numpy())
    convicted = detector.convict(sums, messages, history)
    expelled, names = heard.unsound + convicted, clients_of(convicted)
    undone = None
    if expelled:  # the sums are needed to undo their part, and to redo corrections without them
        sums = sums or detector.sums(history, aggregation.gram(history.sums, single=True).numpy())
        undone = detector.undone(before, expelled, sums, history)
    rest = None if sums is None else sums.without(names)
    left, known = messages.without(names), None if convicted else done
    return _Judged(history.expelling(convicted), left, rest, expelled, undone, known)


@dataclass(frozen=True)
class _Step:
    """The move of the model by the round's aggregate, `change` (d,), and the rule's report.

    `shares` (m,) are the rule's weights of the senders at `rows`, on the rule's device; `senders` is how many
    there are in all.
    """

    change: Tensor
    shares: Tensor
    rows: Places
    senders: int
    report: Report

    @cached_property
    def weights(self) -> Tensor:
        """Each sender's weight in the aggregate, 0 for those left out. Reading it waits for the device."""
        found = torch.zeros(self.senders, dtype=torch.float64)
        found[torch.from_numpy(self.rows)] = self.shares.detach().double().cpu()
        return found


def _aggregated(detector: Detector, heard: _Heard, judged: _Judged, model: Tensor, rule: Served) -> _Step:
    """Aggregate the messages of the remaining members by the rule, and set the aggregate right.

    If every sender is expelled, the model stays where it is.
    """
    staying, sound, vectors = np.arange(len(heard.places)), heard.sound, heard.vectors
    if len(judged.messages.rows) < len(staying):
        staying = np.flatnonzero(np.isin(heard.places, judged.messages.rows))
        sound, there = sound.rows(staying.tolist()), beside(vectors, (len(staying), vectors.shape[1]))
        vectors = torch.index_select(vectors, 0, torch.from_numpy(staying).to(vectors.device), out=there)
    rows, count = heard.rows[staying], len(heard.senders)
    if not len(staying):
        return _Step(torch.zeros_like(model), torch.zeros(0), rows, count, {})
    history, trace, by = judged.history, detector.trace, detector.trace.step(heard.round)
    done = judged.done or rule(sound, history)
    change = done.broadcast[trace.model] - model
    right = detector.corrected(
        judged.messages, lambda: _products(vectors, change / by), history.carried, history
    )
    return _Step(_moved(change, vectors, by * right.mix), done.report["weights"], rows, count, done.report)


def _written_down(judged: _Judged, heard: _Heard, step: _Step) -> ClientHistory:
    """Return the history with the round's weights and move added, and what is undone subtracted."""
    history = judged.history
    moved = history.moved + step.change
    weights = history.weights.index_add(0, torch.tensor(heard.senders, dtype=torch.int64), step.weights)
    return replace(history, weights=weights, moved=moved if judged.undone is None else moved - judged.undone)


def _model_after(
    detector: Detector, history: ClientHistory, judged: _Judged, stepped: Tensor, round_: int
) -> Tensor:
    """Return the model after a round.

    It is `stepped`, the last model plus the round's move; but θ_0 while it waits, and θ_0 + moved set right
    if the sums were looked at.
    """
    if round_ + 1 < min(detector.settings.wait, detector.setup.rounds):
        return history.origin
    return stepped if judged.sums is None else _set_right(detector, history, judged.sums)


def _measuring(
    messages: Messages, trace: Trace, step: float
) -> Callable[[], tuple[Messages, NDArray[np.bool_]]]:
    """Begin to measure messages; the returned function waits and returns them, and which are finite (k,).

    The messages then hold their geometry, if the rule can use it. A message counts as not finite also if
    step × message overflows, because it must not reach a sum.
    """
    vectors = messages.vectors
    if len(vectors) and not trace.around:
        begun = aggregation.geometry_later(vectors, single=vectors.shape[1] >= SINGLE)

        def measured() -> tuple[Messages, NDArray[np.bool_]]:
            geometry = begun()
            held = geometry.finite & (abs(step) * geometry.norms < LARGEST)
            return replace(messages, geometry=geometry), held

        return measured

    def tested() -> tuple[Messages, NDArray[np.bool_]]:
        scale = max(1.0, abs(step))
        if all_finite(vectors if scale == 1.0 else scale * vectors):
            return messages, np.ones(len(vectors), bool)
        return messages, np.array([all_finite(scale * vector) for vector in vectors])

    return tested


def _set_right(detector: Detector, history: ClientHistory, sums: Look) -> Tensor:
    """Return θ_0 + moved, set right along the directions that stand out of the sums."""

    def products() -> Array:
        return _products(history.sums, history.moved)[sums.rows]

    right = detector.corrected(
        sums, products, history.coefficients, history, partial(detector.parts, history)
    )
    mix = np.zeros(len(history.sums))
    mix[sums.rows] = right.mix
    return _moved(history.origin + right.scale * history.moved, history.sums, mix)


def _products(rows: Tensor, vector: Tensor) -> Array:
    """Return rows @ vector on the host, in float64."""
    found: Array = (rows @ vector).double().cpu().numpy()
    return found


def _moved(start: Tensor, rows: Tensor, coefficients: Array) -> Tensor:
    """Return start + coefficients @ rows (d,); rows are not read if all coefficients are 0."""
    return start + combined(rows, coefficients) if coefficients.any() else start
