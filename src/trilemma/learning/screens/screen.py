"""A server that looks at messages before its rule does: a factor for every message.

    x_i              a message, without the model it may be based on
    c = look(x)      c_i = 0 leaves a client out; anything else scales what it sent
    θ ← server(c_i x_i, i not left out)

What a screen remembers is part of the server's state, so that the whole stays a pure function, and liars who
know the state can rehearse a round (`evidence.outlook.Rehearsal`).
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
from trilemma.aggregation.stage import Stage
from trilemma.errors import ConfigError
from trilemma.keys import Key
from trilemma.learning.messages import Messages
from trilemma.learning.protocol import Algorithm, ServerStep, Start, State
from trilemma.learning.settings import Setup
from trilemma.models.types import Model
from trilemma.registry import Registry

PREFIX = "screen."


@dataclass(frozen=True)
class Heard:
    """A round as a screen sees it: messages x (k, d), all finite, whose they are, and what was asked."""

    x: Tensor
    senders: tuple[int, ...]
    round: int
    broadcast: State
    key: Key


@dataclass(frozen=True)
class Seen:
    """What a screen makes of a round: a factor for every message (k,), float64, and its memory after it."""

    factors: Tensor
    memory: Mapping[str, Tensor] = field(default_factory=dict)


class Screen(Protocol):
    """A published defence: built for a stage's options, an algorithm and its federation."""

    def __init__(self, stage: Any, algorithm: Algorithm, setup: Setup) -> None:
        """Prepare, or refuse with the reason."""

    def begin(self, model: Model, key: Key) -> Mapping[str, Tensor]:
        """Return what it remembers before the first round."""

    def look(self, heard: Heard, memory: Mapping[str, Tensor]) -> Seen:
        """Look at a round."""


screens: Registry[type[Screen]] = Registry("screen")
"""Screens by the name of their stage."""


def stage_of(rule: Rule) -> Stage | None:
    """Return the stage a rule begins with, None where it has none.

    >>> stage_of(aggregation.parse("evidence+nnm+mean", f=1)).label
    'evidence'
    """
    steps = rule.steps if isinstance(rule, Chain) else ()
    found = [step for step in steps if isinstance(step, Stage)]
    if found and (len(found) > 1 or steps[0] is not found[0]):
        raise ConfigError(f"{rule.name!r}: {found[-1].label} is looked at once, before everything else")
    return found[0] if found else None


def lessened(rule: Rule, liars: int) -> Rule:
    """Return the same rule for another number of liars.

    >>> lessened(aggregation.parse("evidence+caf", f=3), 1).f
    1
    """
    return rule if rule.f == liars else aggregation.parse(rule.name, f=liars)


def expecting(build: Callable[[Setup], Algorithm], setup: Setup) -> Callable[[int], Algorithm]:
    """Return a function of a number of liars: the algorithm whose rule expects so many, built once each."""

    @cache
    def rebuilt(liars: int) -> Algorithm:
        return build(replace(setup, byzantine=liars, rule=lessened(setup.rule, liars)))

    return rebuilt


def check_one_vector(label: str, algorithm: Algorithm, start: Start) -> None:
    """Refuse an algorithm whose server keeps more than the model that its messages move."""
    assert algorithm.trace is not None
    if set(start.server) != {algorithm.trace.model} or set(start.broadcast) != {algorithm.trace.model}:
        kept = ", ".join(sorted({*start.server, *start.broadcast}))
        raise ConfigError(f"{label} needs a server that keeps one vector; {algorithm.name} here keeps {kept}")


def screened(build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
    """Return the algorithm whose server looks at messages as the stage of its rule says, before the rule."""
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
        seen = screen.look(Heard(x, names, round_, known, key.fold("screen")), memory)
        factors[finite] = seen.factors.double().cpu()
        kept = (seen.factors > 0).nonzero().flatten().tolist()
        weights, report, after = torch.zeros_like(factors), {}, model
        if kept:  # where everybody is left out, the model stays where it is
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
