"""Rules by name, as configurations and the command line write them: `"nnm+cwmed"`, `"bucketing(2)+krum"`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from trilemma.aggregation.steps.chain import Mixing
from trilemma.aggregation.steps.chain import chain as make_chain
from trilemma.aggregation.steps.registry import mixings, rules
from trilemma.aggregation.steps.rule import Rule, Step
from trilemma.base.errors import ConfigError, nearest

AnyStep = TypeVar("AnyStep", bound=Step)

_BETWEEN = re.compile(r"\+(?![^()]*\))")  # a + in parentheses is part of a number

_PART = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\(([^()]*)\))?\s*")


def parse(text: str, f: int, weights: Sequence[float] = ()) -> Rule:
    """Return the rule or chain called `text`, for at most f Byzantine clients, of public weights if given.

    Steps are joined by +, mixing steps first, one rule last. Numbers in parentheses are the parameters of a
    step, in order or by name.

    >>> parse("nnm+cwmed", f=5).name
    'nnm+cwmed'
    >>> parse("evidence(pace=1e+30)+mean", f=1).name
    'evidence(pace=1e+30)+mean'
    >>> parse("nnm+cwmde", f=5)
    Traceback (most recent call last):
    trilemma.base.errors.ConfigError: unknown aggregation rule 'cwmde' in 'nnm+cwmde': did you mean 'cwmed'?
    ...
    """
    parts = [part.strip() for part in _BETWEEN.split(text)]
    steps = [_mixing(part, f, text) for part in parts[:-1]]
    last = _rule(parts[-1], f, text)
    return (make_chain(*steps, last) if steps else last).weighed(weights)


def _rule(part: str, f: int, text: str) -> Rule:
    name, arguments = _split(part, text)
    if name in mixings and name not in rules:
        raise ConfigError(
            f"{text!r} ends in the mixing step {name!r}; end it in a rule, for instance '{text}+mean'"
        )
    if name not in rules:
        raise ConfigError(f"unknown aggregation rule {name!r} in {text!r}: {nearest(name, rules)}")
    return _build(rules[name], name, arguments, f, text)


def _mixing(part: str, f: int, text: str) -> Mixing:
    name, arguments = _split(part, text)
    if name in rules and name not in mixings:
        raise ConfigError(
            f"{name!r} in {text!r} is a rule; only mixing steps come before a +: {', '.join(mixings)}"
        )
    if name not in mixings:
        raise ConfigError(f"unknown mixing step {name!r} in {text!r}: {nearest(name, mixings)}")
    return _build(mixings[name], name, arguments, f, text)


def _split(part: str, text: str) -> tuple[str, str]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(f"cannot read {part!r} in {text!r}; write name or name(number, …), joined by +")
    name = match[1] if match[1] in {*rules, *mixings} else match[1].lower()
    return name, match[2] or ""


def _build(kind: type[AnyStep], name: str, arguments: str, f: int, text: str) -> AnyStep:
    """Build a step with f and the arguments written in the text."""
    allowed = kind.parameters()
    given: dict[str, Any] = {}
    for place, argument in enumerate(filter(None, (a.strip() for a in arguments.split(",")))):
        key, _, value = argument.rpartition("=")
        key = key.strip() or (allowed[place] if place < len(allowed) else "")
        if key not in allowed or key in given:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes no parameters"
            raise ConfigError(f"{argument!r} in {text!r} is not a parameter of {name!r}, which {takes}")
        given[key] = _number(value.strip(), text)
    missing = [key for key in allowed if kind.model_fields[key].is_required() and key not in given]
    if missing:
        raise ConfigError(f"{name!r} in {text!r} needs its parameter: {name}({', '.join(missing)})")
    return kind(f=f, **given)


def _number(text: str, whole: str) -> int | float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{text!r} in {whole!r} is not a number") from None
    return int(value) if value.is_integer() else value
