"""What is under test: everything that is registered, or what pytest's options name.

The registries are imported when somebody asks for names: a pytest that only hands out tests to others does
without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trilemma.base import plugins
from trilemma.base.errors import ConfigError
from trilemma.base.plugins import Plugin
from trilemma.base.registry import Registry

KINDS = {
    "rule": "rules",
    "mixing": "mixing",
    "attack": "attacks",
    "algorithm": "algorithms",
    "model": "models",
    "dataset": "data",
}
"""Every kind of thing that has a suite, and the word of its room."""

SUITES = {
    "test_rules.py": ("rule", "mixing"),
    "test_attacks.py": ("attack",),
    "test_algorithms.py": ("algorithm",),
    "test_models.py": ("model",),
    "test_data.py": ("dataset",),
}
"""Which kinds each suite is about."""

_named: dict[str, list[str]] = {}
"""What is under test, by kind; empty: everything."""

_shapes: list[tuple[tuple[int, ...], int]] = []
"""The shape and the number of classes that a model under test is built for, where they were said."""


def load(references: Sequence[str]) -> tuple[Plugin, ...]:
    """Load plugins, after all that comes with the package: what is registered meanwhile is theirs."""
    if references:
        _registry("rule")
    return plugins.load(references)


def choose(named: Mapping[str, Sequence[str]], loaded: Iterable[Plugin]) -> None:
    """Settle what is under test: the names, or else what the plugins registered, or else everything."""
    _named.clear()
    brought = tuple(loaded)
    if not brought and not any(named.values()):
        return
    registries = {kind: _registry(kind) for kind in KINDS}
    if any(named.values()):
        for kind, names in named.items():
            for name in names:
                _check(registries[kind], name)
            _named[kind] = list(names)
    else:
        entries = set().union(*(plugin.entries for plugin in brought))
        for kind, registry in registries.items():
            _named[kind] = [name for name in registry if (registry.kind, name) in entries]
        if not any(_named.values()):
            _named.clear()
            raise ConfigError(
                f"{', '.join(plugin.name for plugin in brought)} registers nothing that has a suite: "
                f"{', '.join(KINDS.values())}"
            )


def _registry(kind: str) -> Registry[Any]:
    from trilemma.experiment.rooms import rooms

    return rooms()[KINDS[kind]]


def _check(registry: Registry[Any], name: str) -> None:
    """Refuse a name that is not registered, with what there is; of a chain, its last step is looked at."""
    registry[name.split("+")[-1].split("(")[0].strip()]


def everything() -> bool:
    """Whether all that is registered is under test."""
    return not _named


def names(kind: str) -> list[str]:
    """Return the names under test of one kind."""
    return list(_named.get(kind, ())) if _named else list(_registry(kind))


def unneeded() -> set[str]:
    """Return the suites that have nothing to test."""
    return {suite for suite, kinds in SUITES.items() if not any(names(kind) for kind in kinds)}


def shape(text: str, classes: int) -> None:
    """Settle the shape that models under test are built for, written as "3,32,32"; "": any they take."""
    _shapes.clear()
    if text:
        try:
            _shapes.append((tuple(int(part) for part in text.split(",")), classes))
        except ValueError:
            raise ConfigError(f"--shape {text!r}: allowed are whole numbers, as in 3,32,32") from None


def shapes() -> list[tuple[tuple[int, ...], int]]:
    """Return the shapes and numbers of classes to try a model on, in order."""
    return list(_shapes) or [((1, 28, 28), 10), ((3, 32, 32), 10), ((20,), 2), ((20,), 10)]
