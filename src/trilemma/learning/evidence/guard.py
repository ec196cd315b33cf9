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
passes over all coordinates does so only where a direction stands out.

The state is one number per client and coordinate beside two vectors. The first `wait` rounds leave the model
at θ_0; nothing is lost, since sums go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

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
from trilemma.learning.trace import Array, Places, Trace
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
        heard = _heard(court, messages, model, round_)
        judged = _judged(court, File.read(state), heard)
        step = _aggregated(court, inner, heard, judged, model, key)
        file = _written_down(judged, heard, step)
        after = _model_after(court, file, judged, model + step.change, round_)
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


@dataclass(frozen=True)
class _Heard:
    """What a round's `senders` sent: the messages that are `sound`, at `rows` among all of them.

    `vectors` (k, d) are what the sound ones moved the model by, but for the step; `sharing` as in `Messages`.
    """

    round: int
    senders: tuple[int, ...]
    sound: Messages
    rows: Places
    vectors: Tensor
    sharing: int

    @property
    def places(self) -> Places:
        """Whose messages are sound."""
        found: Places = np.array(self.senders, dtype=np.int64)[self.rows]
        return found

    @property
    def unsound(self) -> list[Expulsion]:
        """Who sent what is not finite: an honest client never does."""
        if len(self.rows) == len(self.senders):
            return []
        rows = np.setdiff1d(np.arange(len(self.senders)), self.rows)
        return [Expulsion(self.senders[row], "not finite") for row in rows]

    @property
    def gram(self) -> Array:
        """The Gram matrix of the vectors (k, k)."""
        if not len(self.vectors):
            return np.zeros((0, 0))
        known = self.sound.geometry
        return (aggregation.gram(self.vectors) if known is None else known.gram).numpy()


def _heard(court: Court, messages: Messages, model: Tensor, round_: int) -> _Heard:
    """Set messages aside that are not finite."""
    senders = messages.whose(range(court.setup.clients))
    messages, finite = _measured(messages, court.trace, court.trace.step(round_))
    rows = np.flatnonzero(finite).astype(np.int64)
    sound = messages if finite.all() else messages.rows(rows.tolist())
    vectors = court.trace.vectors(sound.vectors, model)
    return _Heard(round_, senders, sound, rows, vectors, messages.sharing)


@dataclass(frozen=True)
class _Judged:
    """What looking at a round found: who is `expelled`, and the `file` and the looks without them.

    `sums` is None where they were not looked at; `undone` (d,) is what the expelled did to the model, None
    where nobody is expelled.
    """

    file: File
    messages: Look
    sums: Look | None
    expelled: list[Expulsion]
    undone: Tensor | None


def _judged(court: Court, before: File, heard: _Heard) -> _Judged:
    """Put what was heard on file, look at it, and expel who is proved to lie."""
    before = before.reaching(max(heard.senders, default=-1) + 1)
    file, sharing = before.expelling(heard.unsound), heard.sharing or len(before.staying)
    file = court.heard(file, heard.vectors, heard.places, heard.round, sharing)
    measured = aggregation.gram_later(file.sums) if court.due(file, heard.round) else None
    messages = court.messages(file, heard.gram, heard.places)
    sums = None
    if measured is not None:
        messages.seen(court.liars(file))  # while a GPU measures the sums
        sums = court.sums(file, measured().numpy())
    convicted = court.convict(sums, messages, file)
    expelled, names = heard.unsound + convicted, clients_of(convicted)
    undone = None
    if expelled:  # for what is undone, and what was corrected with them in it, sums are looked at
        sums = sums or court.sums(file, aggregation.gram(file.sums, single=True).numpy())
        undone = court.undone(before, expelled, sums, file)
    rest = None if sums is None else sums.without(names)
    return _Judged(file.expelling(convicted), messages.without(names), rest, expelled, undone)


@dataclass(frozen=True)
class _Step:
    """By what the round's aggregate moves the model (d,), with each sender's weight and the rule's report."""

    change: Tensor
    weights: Tensor
    report: Report


def _aggregated(
    court: Court,
    inner: Callable[[int], Algorithm],
    heard: _Heard,
    judged: _Judged,
    model: Tensor,
    key: Key,
) -> _Step:
    """Aggregate the messages of those who stay by the rule, and set the aggregate right.

    `inner` returns the algorithm whose rule expects so many liars. Where all who were asked are expelled,
    the model stays where it is.
    """
    weights = torch.zeros(len(heard.senders), dtype=torch.float64)
    staying, sound, vectors = np.arange(len(heard.places)), heard.sound, heard.vectors
    if len(judged.messages.rows) < len(staying):
        staying = np.flatnonzero(np.isin(heard.places, judged.messages.rows))
        sound, vectors = sound.rows(staying.tolist()), chosen(vectors, staying.tolist())
    if not len(staying):
        return _Step(torch.zeros_like(model), weights, {})
    file, trace, by = judged.file, court.trace, court.trace.step(heard.round)
    done = inner(court.expected(len(staying), file)).server(sound, {trace.model: model}, heard.round, key)
    weights[torch.from_numpy(heard.rows[staying])] = done.report["weights"].detach().double().cpu()
    change = done.broadcast[trace.model] - model
    right = court.corrected(judged.messages, lambda: _products(vectors, change / by), file.carried, file)
    return _Step(_moved(change, vectors, by * right.mix), weights, done.report)


def _written_down(judged: _Judged, heard: _Heard, step: _Step) -> File:
    """Return the file with the round's weights and move, less what is undone."""
    file = judged.file
    taken = file.taken.index_add(0, torch.tensor(heard.senders, dtype=torch.int64), step.weights)
    moved = file.moved + step.change
    return replace(file, taken=taken, moved=moved if judged.undone is None else moved - judged.undone)


def _model_after(court: Court, file: File, judged: _Judged, stepped: Tensor, round_: int) -> Tensor:
    """Return the model after a round: `stepped` on, or from the beginning where sums were looked at."""
    if round_ + 1 < min(court.settings.wait, court.setup.rounds):
        return file.origin
    return stepped if judged.sums is None else _set_right(court, file, judged.sums)


def _measured(messages: Messages, trace: Trace, step: float) -> tuple[Messages, NDArray[np.bool_]]:
    """Return the messages, with their geometry where the rule needs it too, and which of them are finite.

    One whose step is not, though it is itself, counts as infinite: none of it may reach a sum.
    """
    vectors = messages.vectors
    if len(vectors) and not trace.around:
        geometry = aggregation.geometry(vectors, single=vectors.shape[1] >= SINGLE)
        held = geometry.finite & (abs(step) * geometry.norms < LARGEST)
        return replace(messages, geometry=geometry), held
    by = max(1.0, abs(step))
    if all_finite(vectors if by == 1.0 else by * vectors):
        return messages, np.ones(len(vectors), bool)
    return messages, np.array([all_finite(by * vector) for vector in vectors])


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
