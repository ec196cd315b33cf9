"""A filter: the server multiplies every message by a factor before its rule is applied.

    x_i              a message, less the model if it contains it
    c = look(x)      c_i = 0 leaves client i out; any other factor scales its message
    θ ← server(c_i x_i, i not left out)

A filter's memory is part of the server's state. So the server stays a pure function, and liars who know its
state can rehearse a round (`defences.rehearsal`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.learning.defences.stage import Stage, check_one_vector, expecting
from trilemma.learning.messages import Messages
from trilemma.learning.protocol import Algorithm, ServerStep, Start, State
from trilemma.learning.settings import Setup
from trilemma.learning.steps.trace import Trace
from trilemma.models.types import Model

PREFIX = "filter."

DRAWS = "screen"
"""The name in the keys of what a filter draws: what it was called when published results were drawn."""


@dataclass(frozen=True)
class FilteredRound:
    """A round as a filter sees it: messages `x` (k, d), all finite, their senders, and the broadcast."""

    x: Tensor
    senders: tuple[int, ...]
    round: int
    broadcast: State
    key: Key


@dataclass(frozen=True)
class Seen:
    """A filter's result for a round: a factor for every message (k,), float64, and its memory afterwards."""

    factors: Tensor
    memory: Mapping[str, Tensor] = field(default_factory=dict)


class MessageFilter(Protocol):
    """A published defence, built for the options of its stage, an algorithm and the federation's setup."""

    def begin(self, model: Model, key: Key) -> Mapping[str, Tensor]:
        """Return the filter's memory before the first round."""

    def look(self, heard: FilteredRound, memory: Mapping[str, Tensor]) -> Seen:
        """Return the factors of a round's messages, and the memory after it."""


class FilterStage(Stage):
    """A stage that filters messages."""

    @abstractmethod
    def filter(self, algorithm: Algorithm, setup: Setup) -> MessageFilter:
        """Return the filter for an algorithm and a federation's setup, or raise a `ConfigError`."""

    def extended(self, build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
        """See `Stage.extended`."""
        algorithm = build(setup)
        if algorithm.trace is None:
            raise ConfigError(
                f"{self.label} needs messages that move one model; those of {algorithm.name} do not, or not "
                f"alone; allowed: a rule without {self.label}"
            )
        return _filtered(
            algorithm,
            algorithm.trace,
            self.label,
            self.filter(algorithm, setup),
            expecting(build, setup),
            setup,
        )


def _filtered(
    algorithm: Algorithm,
    trace: Trace,
    label: str,
    filter_: MessageFilter,
    inner: Callable[[int], Algorithm],
    setup: Setup,
) -> Algorithm:
    """Return the algorithm whose server filters messages before `inner`, which expects so many liars."""

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        start = algorithm.init(model, ids, key)
        check_one_vector(label, algorithm, start)
        memory = filter_.begin(model, key.fold(DRAWS))
        return replace(start, server={**start.server, **_named(memory)})

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        model = state[trace.model]
        memory = {name[len(PREFIX) :]: part for name, part in state.items() if name.startswith(PREFIX)}
        senders = messages.whose(range(setup.clients))
        finite = torch.isfinite(messages.vectors).all(1).nonzero().flatten().tolist()
        factors = torch.zeros(len(senders), dtype=torch.float64)
        x = trace.vectors(messages.rows(finite).vectors, model)
        known, names = {trace.model: model}, tuple(senders[row] for row in finite)
        seen = filter_.look(FilteredRound(x, names, round_, known, key.fold(DRAWS)), memory)
        factors[finite] = seen.factors.double().cpu()
        kept = (seen.factors > 0).nonzero().flatten().tolist()
        weights, report, after = torch.zeros_like(factors), {}, model
        if kept:  # if everybody is left out, the model stays where it is
            scaled = x[kept] * seen.factors[kept].to(x)[:, None]
            sent = Messages(trace.messages(scaled, model), senders=tuple(names[i] for i in kept))
            expected = min(setup.byzantine, (len(kept) - 1) // 2)
            step = inner(expected).server(sent, known, round_, key)
            report, after = dict(step.report), step.broadcast[trace.model]
            rows = [finite[i] for i in kept]
            weights[rows] = report["weights"].detach().double().cpu() * factors[rows]
        told = {**report, "weights": weights}
        return ServerStep({trace.model: after}, {trace.model: after, **_named(seen.memory)}, told)

    return replace(algorithm, init=init, server=server, filter=label)


def _named(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {PREFIX + name: part for name, part in memory.items()}
