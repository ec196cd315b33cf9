"""A server that remembers: evidence before the rule.

Every round, beside what the algorithm's own server does:

    S_i ← S_i + step · x_i          what client i alone would have moved the model by (`trace`)
    expelled ← convict(looks)       for good; secrets are shared anew among those who stay (`court`)
    a = R(x) + xᵀ y                 y = correct(x): the round's aggregate, set right along visible directions
    moved ← moved + step · a − what is undone
    model = θ_0 + moved + Sᵀ y      y = correct(S): the same over all rounds, when the sums are looked at

**Cost.** The messages' Gram matrix is measured once, for the look and for the rule, and shows messages that
are not finite. Sums are added to in one pass, in memory that is used again (`spare`). Their Gram matrix is
measured when a look is due (`schedule`), its products in float32: an error of 10⁻⁷ where noise leaves 1/√d
undecided. Between looks the model moves by the round's aggregate alone. Whatever else passes over all
coordinates does so only where a direction stands out.

The state is one number per client and coordinate beside two vectors. The first `wait` rounds leave the model
at θ_0; nothing is lost, since sums go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trilemma import aggregation
from trilemma.aggregation import Geometry, Rule
from trilemma.aggregation.evidence import Evidence
from trilemma.errors import ConfigError
from trilemma.keys import Key
from trilemma.learning.evidence.conviction import Expulsion, clients_of
from trilemma.learning.evidence.court import Court, Look, combined
from trilemma.learning.evidence.file import File
from trilemma.learning.messages import Messages
from trilemma.learning.privatise import all_finite
from trilemma.learning.protocol import Algorithm, ServerStep, Start, State
from trilemma.learning.screens.screen import check_one_vector, lessened, stage_of
from trilemma.learning.settings import Setup
from trilemma.learning.trace import Array, Trace
from trilemma.mapped_rows import chosen
from trilemma.models.types import Model
from trilemma.options import LARGEST


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

    @cache
    def without(liars: int) -> Algorithm:
        return build(replace(setup, byzantine=liars, rule=lessened(setup.rule, liars)))

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        start = algorithm.init(model, ids, key)
        check_one_vector("evidence", algorithm, start)
        file = File.empty(setup.clients, setup.rounds, start.broadcast[trace.model])
        return replace(start, server={**start.server, **file.state()})

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        model = state[trace.model]
        senders = messages.senders or tuple(range(setup.clients))
        file = before = File.read(state).reaching(max(senders, default=-1) + 1)
        messages, finite = _measured(messages, trace, trace.step(round_))
        found = [Expulsion(senders[row], "not finite") for row in np.flatnonzero(~finite)]
        rows = np.flatnonzero(finite)
        sound = messages.rows(rows.tolist()) if found else messages
        file = file.expelling(found)
        x, places = trace.vectors(sound.vectors, model), np.array(senders, dtype=np.int64)[rows]
        file = court.heard(file, x, places, round_, messages.sharing or len(before.staying))
        fresh = court.messages(file, _gram(x, sound.geometry), places)
        sums = _looked_at(court, file) if court.due(file, round_) else None
        convicted = court.convict(sums, fresh, file)
        found, names = found + convicted, clients_of(convicted)
        if found and sums is None:  # for what is undone, and what was corrected with them in it
            sums = _looked_at(court, file)
        undone = None if sums is None or not found else court.undone(before, found, sums, file)
        file, fresh = file.expelling(convicted), fresh.without(names)
        sums = None if sums is None else sums.without(names)

        staying = np.flatnonzero(~np.isin(places, names)) if len(names) else np.arange(len(places))
        weights, report = torch.zeros(len(senders), dtype=torch.float64), {}
        if not len(staying):  # where all who were asked this time are expelled, the model stays where it is
            change = torch.zeros_like(model)
        else:
            inner = without(min(court.liars(file), max(0, (len(staying) - 1) // 2)))
            step = inner.server(sound.rows(staying.tolist()), {trace.model: model}, round_, key)
            report, change = dict(step.report), step.broadcast[trace.model] - model
            weights[torch.from_numpy(rows[staying])] = report["weights"].detach().double().cpu()
            everybody = len(staying) == len(x)
            heard, by = x if everybody else chosen(x, staying.tolist()), trace.step(round_)
            mean = change
            right = court.corrected(fresh, lambda: _products(heard, mean / by), file.carried, file)
            change = _moved(change, heard, by * right.mix)
        taken = file.taken.index_add(0, torch.tensor(senders), weights)
        moved = file.moved + change
        file = replace(file, taken=taken, moved=moved if undone is None else moved - undone)
        if round_ < setup.rounds - 1 and round_ + 1 < settings.wait:
            after = file.origin
        elif sums is None:
            after = model + change
        else:
            after = _set_right(court, file, sums)
        told = {**report, "weights": weights, "expelled": tuple(found)}
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


def _measured(messages: Messages, trace: Trace, step: float) -> tuple[Messages, NDArray[np.bool_]]:
    """Return the messages, with their geometry where the rule needs it too, and which of them are finite.

    One whose step is not, though it is itself, counts as infinite: none of it may reach a sum.
    """
    vectors = messages.vectors
    if len(vectors) and not trace.around:
        geometry = aggregation.geometry(vectors)
        held = geometry.finite & (abs(step) * geometry.norms < LARGEST)
        return replace(messages, geometry=geometry), held
    by = max(1.0, abs(step))
    if all_finite(vectors if by == 1.0 else by * vectors):
        return messages, np.ones(len(vectors), bool)
    return messages, np.array([all_finite(by * vector) for vector in vectors])


def _looked_at(court: Court, file: File) -> Look:
    """Return a look at the sums."""
    return court.sums(file, aggregation.gram(file.sums, single=True).numpy())


def _set_right(court: Court, file: File, sums: Look) -> Tensor:
    """Return the model, set right along the directions that stand out of the sums."""

    def beside() -> Array:
        return _products(file.sums, file.moved)[sums.rows]

    right = court.corrected(sums, beside, file.coefficients, file, partial(court.parts, file))
    mix = np.zeros(len(file.sums))
    mix[sums.rows] = right.mix
    return _moved(file.origin + right.kept * file.moved, file.sums, mix)


def _gram(x: Tensor, known: Geometry | None) -> Array:
    if not len(x):
        return np.zeros((0, 0))
    return (aggregation.gram(x) if known is None else known.gram).numpy()


def _products(rows: Tensor, vector: Tensor) -> Array:
    found: Array = (rows @ vector).double().cpu().numpy()
    return found


def _moved(start: Tensor, rows: Tensor, coefficients: Array) -> Tensor:
    """Return start + coefficients @ rows; where there is nothing to add, nothing is read."""
    return start + combined(rows, coefficients) if coefficients.any() else start
