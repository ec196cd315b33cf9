"""A screen: the server multiplies every message by a factor before its rule is applied.

    x_i              a message, less the model if it contains it
    c = look(x)      c_i = 0 leaves client i out; any other factor scales its message
    θ ← server(c_i x_i, i not left out)

A screen's memory is part of the server's state. So the server stays a pure function, and liars who know its
state can rehearse a round (`evidence.outlook.Rehearsal`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from trilemma import aggregation
from trilemma.aggregation import Chain, Rule
from trilemma.aggregation.steps.stage import Stage
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.base.registry import Registry
from trilemma.learning.messages import Messages
from trilemma.learning.protocol import Algorithm, ServerStep, Start, State
from trilemma.learning.settings import Setup
from trilemma.models.types import Model

PREFIX = "screen."


@dataclass(frozen=True)
class ScreenedRound:
    """A round as a screen sees it: messages `x` (k, d), all finite, their senders, and the broadcast."""

    x: Tensor
    senders: tuple[int, ...]
    round: int
    broadcast: State
    key: Key


@dataclass(frozen=True)
class Seen:
    """A screen's result for a round: a factor for every message (k,), float64, and its memory afterwards."""

    factors: Tensor
    memory: Mapping[str, Tensor] = field(default_factory=dict)


class Screen(Protocol):
    """A published defence, built for the options of its stage, an algorithm and the federation's setup."""

    def __init__(self, stage: Any, algorithm: Algorithm, setup: Setup) -> None:
        """Prepare for this algorithm and setup, or raise a `ConfigError` that says why not."""

    def begin(self, model: Model, key: Key) -> Mapping[str, Tensor]:
        """Return the screen's memory before the first round."""

    def look(self, heard: ScreenedRound, memory: Mapping[str, Tensor]) -> Seen:
        """Return the factors of a round's messages, and the memory after it."""


screens: Registry[type[Screen]] = Registry("screen")
"""Screens by the name of their stage."""


def stage_of(rule: Rule) -> Stage | None:
    """Return the stage that a rule begins with; None if it has none.

    >>> stage_of(aggregation.parse("evidence+nnm+mean", f=1)).label
    'evidence'
    """
    steps = rule.steps if isinstance(rule, Chain) else ()
    found = [step for step in steps if isinstance(step, Stage)]
    if found and (len(found) > 1 or steps[0] is not found[0]):
        raise ConfigError(f"{rule.name!r}: {found[-1].label} is looked at once, before everything else")
    return found[0] if found else None


def lessened(rule: Rule, liars: int) -> Rule:
    """Return the same rule, expecting another number of liars.

    >>> lessened(aggregation.parse("evidence+caf", f=3), 1).f
    1
    """
    return rule if rule.f == liars else aggregation.parse(rule.name, f=liars)


def expecting(build: Callable[[Setup], Algorithm], setup: Setup) -> Callable[[int], Algorithm]:
    """Return a function: number of liars -> the algorithm whose rule expects so many, each built once."""

    @cache
    def rebuilt(liars: int) -> Algorithm:
        return build(replace(setup, byzantine=liars, rule=lessened(setup.rule, liars)))

    return rebuilt


def check_one_vector(label: str, algorithm: Algorithm, start: Start) -> None:
    """Refuse an algorithm whose server keeps or broadcasts anything but the model that messages move."""
    assert algorithm.trace is not None
    if set(start.server) != {algorithm.trace.model} or set(start.broadcast) != {algorithm.trace.model}:
        kept = ", ".join(sorted({*start.server, *start.broadcast}))
        raise ConfigError(f"{label} needs a server that keeps one vector; {algorithm.name} here keeps {kept}")


def screened(build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
    """Return the algorithm with the screen that its rule begins with."""
    algorithm, stage = build(setup), stage_of(setup.rule)
    assert stage is not None
    trace = algorithm.trace
    if trace is None:
        raise ConfigError(
            f"{stage.label} needs messages that move one model; those of {algorithm.name} do not, or not "
            f"alone; allowed: a rule without {stage.label}"
        )
    screen = screens[stage.label](stage, algorithm, setup)
    inner = expecting(build, setup)

    def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
        start = algorithm.init(model, ids, key)
        check_one_vector(stage.label, algorithm, start)
        memory = screen.begin(model, key.fold("screen"))
        return replace(start, server={**start.server, **_named(memory)})

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        model = state[trace.model]
        memory = {name[len(PREFIX) :]: part for name, part in state.items() if name.startswith(PREFIX)}
        senders = messages.whose(range(setup.clients))
        finite = torch.isfinite(messages.vectors).all(1).nonzero().flatten().tolist()
        factors = torch.zeros(len(senders), dtype=torch.float64)
        x = trace.vectors(messages.rows(finite).vectors, model)
        known, names = {trace.model: model}, tuple(senders[row] for row in finite)
        seen = screen.look(ScreenedRound(x, names, round_, known, key.fold("screen")), memory)
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

    return replace(algorithm, init=init, server=server, screen=stage.label)


def _named(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {PREFIX + name: part for name, part in memory.items()}
