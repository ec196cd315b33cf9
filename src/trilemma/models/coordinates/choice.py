"""From what is said about a model to which of its tensors are trained, and how."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.models.coordinates.layers import of_layers
from trilemma.models.coordinates.modules import linear_layers, of_module
from trilemma.models.coordinates.options import Lora, Subspace, Train
from trilemma.models.coordinates.parts import Adapter, Parts
from trilemma.models.coordinates.subspace import in_subspace
from trilemma.models.modules.engine import ModuleEngine
from trilemma.models.types import Model, layer_of

LISTED = 40
"""How many names a message lists."""


def choose(model: Model, train: Train, key: Key) -> Model:
    """Return the model of which only `train` is trained; the rest stays where a run with this key starts.

    >>> from trilemma import models
    >>> cnn = models.build("cnn", (1, 28, 28), 10)
    >>> ways = "all", "head", ("conv*", "*.bias"), Subspace(subspace=64)
    >>> [choose(cnn, train, Key(1)).dim for train in ways]
    [431080, 5010, 26080, 64]
    >>> [name for name, _ in choose(cnn, Lora(lora=4), Key(1)).shapes]
    ['fc1.lora_A', 'fc1.lora_B', 'fc2.weight', 'fc2.bias']
    """
    if train == "all":
        return model
    # Where an algorithm starts from one model for all, it starts there (`learning`): the head of a run is the
    # same whatever else is trained.
    start = model.init(key.fold("init", "model"))
    if isinstance(train, Subspace):
        if train.subspace > model.dim:
            raise ConfigError(
                f"[model] train = {train}: {model.name!r} has {model.dim:,} parameters; allowed: 1 to "
                f"{model.dim}"
            )
        return in_subspace(model, start, train.subspace, key.fold("subspace"))
    parts = _adapted(model, train) if isinstance(train, Lora) else Parts(_named(model, train))
    make = of_module if isinstance(model.engine, ModuleEngine) else of_layers
    return make(model, start, parts)


def _named(model: Model, train: str | tuple[str, ...]) -> frozenset[str]:
    """Return the names of the tensors that are trained."""
    names = [name for name, _ in model.shapes]
    if isinstance(train, str):
        return frozenset(name for name in names if layer_of(name) == _head(model))
    found: set[str] = set()
    for pattern in train:
        matched = [name for name in names if _matches(name, pattern) or _matches(layer_of(name), pattern)]
        if not matched:
            raise ConfigError(
                f"[model] train: nothing in {model.name!r} is called {pattern!r}; there are {_list(names)}"
            )
        found.update(matched)
    if not found:
        raise ConfigError(f"[model] train = []: nothing to train; there are {_list(names)}")
    return frozenset(found)


def _head(model: Model) -> str:
    """Return the name of the last layer."""
    last = model.layers[-1].name
    if all(len(shape) < 2 for name, shape in model.shapes if layer_of(name) == last):
        names = [layer.name for layer in model.layers]
        raise ConfigError(
            f'[model] train = "head": the last layer of {model.name!r}, {last!r}, has no weights but shifts '
            f"and scales; say which are meant by name, among {_list(names)}"
        )
    return last


def _adapted(model: Model, train: Lora) -> Parts:
    """Return the linear layers that get adapters, and the head."""
    layers = linear_layers(model)
    sizes = _list(f"{name} ({outputs} × {inputs})" for name, (outputs, inputs) in layers.items())
    if not layers:
        raise ConfigError(
            f"[model] train = {train}: {model.name!r} has no linear layer for an adapter; its layers are "
            f"{_list(layer.name for layer in model.layers)}. Allowed: names of these, or {{subspace = …}}"
        )
    head = _head(model) if train.head or train.on is None else ""
    if train.on is None:
        chosen = [name for name in layers if name != head]
        if not chosen:
            raise ConfigError(
                f"[model] train = {train}: the only linear layer of {model.name!r} is its head, {head!r}; "
                f'allowed: "head", or on = ["{head}"]'
            )
    else:
        chosen = []
        for pattern in train.on:
            matched = [name for name in layers if _matches(name, pattern)]
            if not matched:
                raise ConfigError(
                    f"[model] train = {train}: no linear layer of {model.name!r} is called {pattern!r}; "
                    f"there are {sizes}"
                )
            chosen += matched
    for name in chosen:
        if train.lora > min(layers[name]):
            raise ConfigError(
                f"[model] train = {train}: rank {train.lora} is more than {name!r} has; allowed: at most the "
                f"smaller side of every layer that gets an adapter, of {sizes}"
            )
    adapters = {name: Adapter(train.lora, train.scale) for name in dict.fromkeys(chosen)}
    trained = _named(model, "head") if train.head and head not in adapters else frozenset[str]()
    return Parts(trained, adapters)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern)


def _list(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(found[:LISTED]) + more
