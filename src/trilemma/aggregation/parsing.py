"""Rules by name, as configurations and the command line write them: `"nnm+cwmed"`, `"bucketing(2)+krum"`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from trilemma.aggregation.chain import Mixing
from trilemma.aggregation.chain import chain as make_chain
from trilemma.aggregation.registry import mixings, rules
from trilemma.aggregation.rule import Rule
from trilemma.errors import ConfigError, nearest

_PART = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*(?:\(([^()]*)\))?\s*")


def parse(text: str, f: int) -> Rule:
    """Return the rule or chain called `text`, for at most f Byzantine clients.

    Steps are joined by +, mixing steps first, one rule last. Numbers in parentheses are the parameters of a
    step, in order or by name.

    >>> parse("nnm+cwmed", f=5).name
    'nnm+cwmed'
    >>> parse("nnm+cwmde", f=5)
    Traceback (most recent call last):
    trilemma.errors.ConfigError: unknown aggregation rule 'cwmde' in 'nnm+cwmde': did you mean 'cwmed'? ...
    """
    parts = [part.strip() for part in text.split("+")]
    steps = [_mixing(part, f, text) for part in parts[:-1]]
    last = _rule(parts[-1], f, text)
    return make_chain(*steps, last) if steps else last


def _rule(part: str, f: int, text: str) -> Rule:
    name, arguments = _split(part, text)
    if name in mixings and name not in rules:
        raise ConfigError(
            f"{text!r} ends in the mixing step {name!r}; end it in a rule, for instance '{text}+mean'"
        )
    if name not in rules:
        raise ConfigError(f"unknown aggregation rule {name!r} in {text!r}: {nearest(name, rules)}")
    rule: Rule = _call(rules[name], name, arguments, f, text)
    return rule


def _mixing(part: str, f: int, text: str) -> Mixing:
    name, arguments = _split(part, text)
    if name in rules and name not in mixings:
        raise ConfigError(
            f"{name!r} in {text!r} is a rule; only mixing steps come before a +: {', '.join(mixings)}"
        )
    if name not in mixings:
        raise ConfigError(f"unknown mixing step {name!r} in {text!r}: {nearest(name, mixings)}")
    step: Mixing = _call(mixings[name], name, arguments, f, text)
    return step


def _split(part: str, text: str) -> tuple[str, str]:
    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(f"cannot read {part!r} in {text!r}; write name or name(number, …), joined by +")
    return match[1].lower(), match[2] or ""


def _call(factory: Callable[..., Any], name: str, arguments: str, f: int, text: str) -> Any:
    """Call a factory with f and the arguments written in the text."""
    allowed = [p for p in inspect.signature(factory).parameters if p != "f"]
    given: dict[str, Any] = {}
    for place, argument in enumerate(filter(None, (a.strip() for a in arguments.split(",")))):
        key, _, value = argument.rpartition("=")
        key = key.strip() or (allowed[place] if place < len(allowed) else "")
        if key not in allowed or key in given:
            takes = f"takes {', '.join(allowed)}" if allowed else "takes no parameters"
            raise ConfigError(f"{argument!r} in {text!r} is not a parameter of {name!r}, which {takes}")
        given[key] = _number(value.strip(), text)
    try:
        return factory(f=f, **given)
    except TypeError:
        missing = [p for p in allowed if p not in given]
        raise ConfigError(f"{name!r} in {text!r} needs its parameter: {name}({', '.join(missing)})") from None


def _number(text: str, whole: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} in {whole!r} is not a number") from None
