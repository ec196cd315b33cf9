"""Everything that has a name, by the word users know its kind by: for listings and for the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from trilemma import aggregation, attacks, data, learning, models
from trilemma.aggregation.steps.rule import Step
from trilemma.base.errors import ConfigError, nearest
from trilemma.base.options import Option, describe, reference
from trilemma.base.plugins import installed
from trilemma.base.registry import Registry
from trilemma.experiment.ready import ready
from trilemma.privacy.accounting.accountants import accountants
from trilemma.privacy.threats.catalogue import threat_models


def rooms() -> dict[str, Registry[Any]]:
    """Return every registry by its word, with what installed packages brought.

    >>> sorted(rooms()["mixing"])
    ['arc', 'bucketing', 'clip', 'evidence', 'fltrust', 'nnm', 'noise-test', 'noise-test-rank', 'safeguard']
    """
    installed()
    return {
        "rules": aggregation.rules,
        "mixing": aggregation.mixings,
        "attacks": attacks.attacks,
        "algorithms": learning.algorithms,
        "data": data.datasets,
        "partitions": data.partitions,
        "features": data.feature_maps,
        "models": models.models,
        "accountants": accountants,
        "threats": threat_models,
        "configs": ready,
    }


@dataclass(frozen=True)
class Described:
    """One thing with a name: what it is, what may be set, where it comes from."""

    kind: str
    name: str
    summary: str
    options: list[Option]
    reference: str
    thing: Any


def described(registry: Registry[Any], name: str) -> Described:
    """Return what there is to say about a thing.

    f is no option of a rule: it is the number of clients the federation tolerates.
    """
    thing = registry[name]
    options: list[Option] = []
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        unset = {"f"} if issubclass(thing, Step) else set()
        options = [option for option in describe(thing) if option.name not in unset]
    return Described(registry.kind, name, registry.summary(name), options, reference(thing), thing)


def find(name: str) -> list[Described]:
    """Return everything called `name`, whatever its kind.

    >>> [(found.kind, found.name) for found in find("krum")]
    [('aggregation rule', 'krum')]
    """
    known = rooms()
    found = [described(registry, name) for registry in known.values() if name in registry]
    if not found:
        names = [*known, *(other for registry in known.values() for other in registry)]
        raise ConfigError(f"nothing is called {name!r}: {nearest(name, names, listed_by='trilemma list')}")
    return found
