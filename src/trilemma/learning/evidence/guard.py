"""A server that remembers: evidence before the rule.

Every round, beside what the algorithm's own server does:

    S_i ← S_i + step · x_i          what client i alone would have moved the model by (`trace`)
    expelled ← convict(looks)       for good; secrets are shared anew among those who stay (`court`)
    a = R(x) + xᵀ y                 y = correct(x): the round's aggregate, set right along visible directions
    moved ← moved + step · a − what is undone
    model = θ_0 + moved + Sᵀ y      y = correct(S): the same over all rounds, when the sums are looked at

**Cost.** The messages' Gram matrix is measured once, for the look and for the rule, and shows messages that
are not finite. Sums are added to in one pass, in memory that is used again (`spare`). Their Gram matrix is
measured when a look is due (`schedule`). Products are float32, of long messages too: an error of 10⁻⁷ where
noise leaves 1/√d undecided. Between looks the model moves by the round's aggregate alone. Whatever else
passes over all coordinates does so only where a direction stands out. A GPU and its host work at the same
time: messages are put on file as if all were sound while they are measured, and the rule weighs all of them
while sums are; both are done again where somebody is left out, which is rare.

The state is one number per client and coordinate beside two vectors. The first `wait` rounds leave the model
at θ_0; nothing is lost, since sums go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trilemma import aggregation
from trilemma.aggregation import Rule
from trilemma.aggregation.evidence import Evidence
from trilemma.errors import ConfigError
from trilemma.keys import Key
from trilemma.learning.evidence.conviction import Expulsion, clients_of
from trilemma.learning.evidence.court import Court, Look, combined
from trilemma.learning.evidence.file import File
from trilemma.learning.messages import Messages
from trilemma.learning.privatise import all_finite
from trilemma.learning.protocol import Algorithm, Report, ServerStep, Start, State
from trilemma.learning.screens.screen import check_one_vector, expecting, stage_of
from trilemma.learning.settings import Setup
from trilemma.learning.trace import Array, Law, Places, Trace
from trilemma.mapped_rows import chosen
from trilemma.models.types import Model
from trilemma.options import LARGEST

SINGLE = 1 << 16
"""Messages of so many numbers are measured in float32: shorter ones cost next to nothing."""


def evidence_of(rule: Rule) -> Evidence | None:
    """Return the evidence stage a rule begins with, None where it has none.

    >>> evidence_of(aggregation.parse("evidence+nnm+mean", f=1)).label
    'evidence'
    """
    stage = stage_of(rule)
    return stage if isinstance(stage, Evidence) else None


def guarded(build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
    """Return the algorithm with evidence before its rule, if the rule asks for it and there is noise."""
    algorithm = build(setup)
    settings = evidence_of(setup.rule)
    if settings is None or setup.release is None or setup.release.law.silent:
        return algorithm
    trace = _traceable(algorithm, setup)
    court = Court(settings, setup, trace)
    inner = expecting(build, setup)

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        start = algorithm.init(model, ids, key)
        check_one_vector("evidence", algorithm, start)
        file = File.empty(setup.clients, setup.rounds, start.broadcast[trace.model])
        return replace(start, server={**start.server, **file.state()})

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        model = state[trace.model]

        def rule(sound: Messages, file: File) -> ServerStep:
            expecting_liars = inner(court.expected(len(sound.vectors), file))
            return expecting_liars.server(sound, {trace.model: model}, round_, key)

        heard = _heard(court, state, messages, round_)
        judged = _judged(court, heard, rule)
        step = _aggregated(court, heard, judged, model, rule)
        stepped, file = model + step.change, _written_down(judged, heard, step)
        after = _model_after(court, file, judged, stepped, round_)
        told = {**step.report, "weights": step.weights, "expelled": tuple(judged.expelled)}
        return ServerStep({trace.model: after}, {trace.model: after, **file.state()}, told)

    def members(state: State) -> tuple[int, ...]:
        return tuple(int(i) for i in File.read(state).staying)

    return replace(algorithm, init=init, server=server, members=members, court=court)


def _traceable(algorithm: Algorithm, setup: Setup) -> Trace:
    """Return how releases reach the model, or refuse with the reason."""
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


Served = Callable[[Messages, File], ServerStep]
"""What the algorithm's own server does with sound messages of members on file."""


@dataclass(frozen=True)
class _Heard:
    """What a round's `senders` sent: the messages that are `sound`, at `rows` among all of them.

    `vectors` (k, d) are what the sound ones moved the model by, but for the step, `unsound` who sent what is
    not finite. `before` is the file as it was, `file` the one with this round on it, `law` that of the sound
    messages; `sums` waits for the Gram matrix of the file's sums, None where they are not looked at.
    """

    round: int
    senders: tuple[int, ...]
    sound: Messages
    rows: Places
    vectors: Tensor
    unsound: list[Expulsion]
    before: File
    file: File
    law: Law
    sums: Callable[[], Tensor] | None

    @property
    def places(self) -> Places:
        """Whose messages are sound."""
        found: Places = np.array(self.senders, dtype=np.int64)[self.rows]
        return found

    @property
    def gram(self) -> Array:
        """The Gram matrix of the vectors (k, k)."""
        if not len(self.vectors):
            return np.zeros((0, 0))
        known = self.sound.geometry
        return (aggregation.gram(self.vectors) if known is None else known.gram).numpy()


def _heard(court: Court, state: State, messages: Messages, round_: int) -> _Heard:
    """Put messages on file, those set aside that are not finite."""
    measured = _measuring(messages, court.trace, court.trace.step(round_))
    senders, model = messages.whose(range(court.setup.clients)), state[court.trace.model]
    before = File.read(state).reaching(max(senders, default=-1) + 1)
    sharing = messages.sharing or len(before.staying)

    def filed(sound: Messages, finite: NDArray[np.bool_]) -> _Heard:
        rows, vectors = np.flatnonzero(finite), court.trace.vectors(sound.vectors, model)
        # An honest client never sends what is not finite.
        unsound = [Expulsion(senders[row], "not finite") for row in np.flatnonzero(~finite)]
        places = np.array(senders, dtype=np.int64)[rows]
        file = court.heard(before.expelling(unsound), vectors, places, round_, sharing)
        sums = aggregation.gram_later(file.sums) if court.due(file, round_) else None
        law = file.law(file.carried, places)
        return _Heard(round_, senders, sound, rows, vectors, unsound, before, file, law, sums)

    heard = filed(messages, np.ones(len(senders), bool))  # while a GPU measures
    messages, finite = measured()
    if finite.all():
        return replace(heard, sound=messages)
    del heard
    return filed(messages.rows(np.flatnonzero(finite).tolist()), finite)


@dataclass(frozen=True)
class _Judged:
    """What looking at a round found: who is `expelled`, and the `file` and the looks without them.

    `sums` is None where they were not looked at; `undone` (d,) is what the expelled did to the model, None
    where nobody is expelled. `done` is what the rule makes of everybody, where that was worked out meanwhile.
    """

    file: File
    messages: Look
    sums: Look | None
    expelled: list[Expulsion]
    undone: Tensor | None
    done: ServerStep | None


def _judged(court: Court, heard: _Heard, rule: Served) -> _Judged:
    """Look at what was heard, and expel who is proved to lie."""
    file, before = heard.file, heard.before
    messages = court.messages(file, heard.gram, heard.places, heard.law)
    sums = done = None
    if heard.sums is not None:
        messages.seen(court.liars(file))
        if file.sums.is_cuda and len(heard.places) and not court.convict(None, messages, file):
            done = rule(heard.sound, file)  # while a GPU measures the sums
        sums = court.sums(file, heard.sums().numpy())
    convicted = court.convict(sums, messages, file)
    expelled, names = heard.unsound + convicted, clients_of(convicted)
    undone = None
    if expelled:  # for what is undone, and what was corrected with them in it, sums are looked at
        sums = sums or court.sums(file, aggregation.gram(file.sums, single=True).numpy())
        undone = court.undone(before, expelled, sums, file)
    rest = None if sums is None else sums.without(names)
    left, known = messages.without(names), None if convicted else done
    return _Judged(file.expelling(convicted), left, rest, expelled, undone, known)


@dataclass(frozen=True)
class _Step:
    """By what the round's aggregate moves the model (d,), and the rule's report.

    `shares` (m,) are the weights of those in `rows` of the senders, where the rule left them.
    """

    change: Tensor
    shares: Tensor
    rows: Places
    senders: int
    report: Report

    @cached_property
    def weights(self) -> Tensor:
        """Each sender's weight: who asks for it waits for the aggregate."""
        found = torch.zeros(self.senders, dtype=torch.float64)
        found[torch.from_numpy(self.rows)] = self.shares.detach().double().cpu()
        return found


def _aggregated(court: Court, heard: _Heard, judged: _Judged, model: Tensor, rule: Served) -> _Step:
    """Aggregate the messages of those who stay by the rule, and set the aggregate right.

    Where all who were asked are expelled, the model stays where it is.
    """
    staying, sound, vectors = np.arange(len(heard.places)), heard.sound, heard.vectors
    if len(judged.messages.rows) < len(staying):
        staying = np.flatnonzero(np.isin(heard.places, judged.messages.rows))
        sound, vectors = sound.rows(staying.tolist()), chosen(vectors, staying.tolist())
    rows, count = heard.rows[staying], len(heard.senders)
    if not len(staying):
        return _Step(torch.zeros_like(model), torch.zeros(0), rows, count, {})
    file, trace, by = judged.file, court.trace, court.trace.step(heard.round)
    done = judged.done or rule(sound, file)
    change = done.broadcast[trace.model] - model
    right = court.corrected(judged.messages, lambda: _products(vectors, change / by), file.carried, file)
    return _Step(_moved(change, vectors, by * right.mix), done.report["weights"], rows, count, done.report)


def _written_down(judged: _Judged, heard: _Heard, step: _Step) -> File:
    """Return the file with the round's weights and move, less what is undone."""
    file = judged.file
    moved = file.moved + step.change
    taken = file.taken.index_add(0, torch.tensor(heard.senders, dtype=torch.int64), step.weights)
    return replace(file, taken=taken, moved=moved if judged.undone is None else moved - judged.undone)


def _model_after(court: Court, file: File, judged: _Judged, stepped: Tensor, round_: int) -> Tensor:
    """Return the model after a round: `stepped` on, or from the beginning where sums were looked at."""
    if round_ + 1 < min(court.settings.wait, court.setup.rounds):
        return file.origin
    return stepped if judged.sums is None else _set_right(court, file, judged.sums)


def _measuring(
    messages: Messages, trace: Trace, step: float
) -> Callable[[], tuple[Messages, NDArray[np.bool_]]]:
    """Begin to measure messages; what is returned waits for them and for which of them are finite.

    They come with their geometry where the rule needs it too. One whose step is not finite, though it is
    itself, counts as infinite: none of it may reach a sum.
    """
    vectors = messages.vectors
    if len(vectors) and not trace.around:
        begun = aggregation.geometry_later(vectors, single=vectors.shape[1] >= SINGLE)

        def measured() -> tuple[Messages, NDArray[np.bool_]]:
            geometry = begun()
            held = geometry.finite & (abs(step) * geometry.norms < LARGEST)
            return replace(messages, geometry=geometry), held

        return measured

    def looked_through() -> tuple[Messages, NDArray[np.bool_]]:
        by = max(1.0, abs(step))
        if all_finite(vectors if by == 1.0 else by * vectors):
            return messages, np.ones(len(vectors), bool)
        return messages, np.array([all_finite(by * vector) for vector in vectors])

    return looked_through


def _set_right(court: Court, file: File, sums: Look) -> Tensor:
    """Return the model, set right along the directions that stand out of the sums."""

    def beside() -> Array:
        return _products(file.sums, file.moved)[sums.rows]

    right = court.corrected(sums, beside, file.coefficients, file, partial(court.parts, file))
    mix = np.zeros(len(file.sums))
    mix[sums.rows] = right.mix
    return _moved(file.origin + right.kept * file.moved, file.sums, mix)


def _products(rows: Tensor, vector: Tensor) -> Array:
    found: Array = (rows @ vector).double().cpu().numpy()
    return found


def _moved(start: Tensor, rows: Tensor, coefficients: Array) -> Tensor:
    """Return start + coefficients @ rows; where there is nothing to add, nothing is read."""
    return start + combined(rows, coefficients) if coefficients.any() else start
