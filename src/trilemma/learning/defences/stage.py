"""Stages: steps of a chain that need more than one round's messages, and are the server's work.

A mixing step sees a round's messages and nothing else. A stage is named before a rule likewise, as in
`"evidence+mean"`, but what it does takes memory, knowledge of the noise, or public examples: it extends the
algorithm's server. Of one round's messages alone it knows nothing, and leaves them as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np

from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.chain import Chain, Mixing
from trilemma.aggregation.steps.parsing import parse
from trilemma.aggregation.steps.rule import Rule
from trilemma.aggregation.steps.types import Array
from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.learning.messages import Messages
from trilemma.learning.protocol import Algorithm, ServerStep, Start, State
from trilemma.learning.settings import Setup


class Stage(Mixing):
    """A step that the server takes, before the rule; messages alone pass through it unchanged."""

    passes: ClassVar[bool] = True

    @abstractmethod
    def extended(self, build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
        """Return the algorithm that `build` returns, with a server that takes this step too."""

    def matrix(self, geometry: Geometry, f: int, key: Key) -> Array:
        """Return the identity."""
        return np.eye(geometry.n)

    def kappa(self, after: float, n: int) -> float | None:
        """Messages pass through: the κ of what comes after."""
        return after


def staged(build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
    """Return the algorithm, its server extended by the stage that the rule begins with, if there is one."""
    stage = stage_of(setup.rule)
    if stage is not None:
        return stage.extended(build, setup)
    return weighed(build, setup) if setup.rule.weights else build(setup)


def weighed(build: Callable[[Setup], Algorithm], setup: Setup) -> Algorithm:
    """Return the algorithm; its rule has the weights of those whose messages the server is given."""
    algorithm = build(setup)

    @cache
    def among(senders: tuple[int, ...]) -> Algorithm:
        return build(replace(setup, rule=setup.rule.among(senders)))

    def server(messages: Messages, state: State, round_: int, key: Key) -> ServerStep:
        senders = messages.whose(range(setup.clients))
        return among(tuple(senders)).server(messages, state, round_, key)

    return replace(algorithm, server=server)


def stage_of(rule: Rule) -> Stage | None:
    """Return the stage that a rule begins with; None if it has none.

    >>> stage_of(parse("evidence+nnm+mean", f=1)).label
    'evidence'
    """
    steps = rule.steps if isinstance(rule, Chain) else ()
    found = [step for step in steps if isinstance(step, Stage)]
    if found and (len(found) > 1 or steps[0] is not found[0]):
        raise ConfigError(f"{rule.name!r}: {found[-1].label} is looked at once, before everything else")
    return found[0] if found else None


def lessened(rule: Rule, liars: int) -> Rule:
    """Return the same rule, expecting another number of liars.

    >>> lessened(parse("evidence+caf", f=3), 1).f
    1
    """
    return rule if rule.f == liars else parse(rule.name, f=liars)


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
