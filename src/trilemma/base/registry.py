"""Names for things: rules, attacks, algorithms, data sets, partitions, models.

Adding one is one file and one registration; the shared test suites, the configuration, `trilemma list` and
the error messages read the registry and pick it up from there.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from trilemma.base.errors import ConfigError, nearest, printable

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A read-only mapping from names to things, filled by a decorator.

    The first line of a thing's docstring is its summary in listings, unless one is given.

    >>> shapes: Registry[type] = Registry("shape")
    >>> @shapes.register("square")
    ... class Square:
    ...     "Four equal sides."
    >>> shapes["square"] is Square, shapes.summary("square")
    (True, 'Four equal sides.')
    >>> shapes["sqare"]
    Traceback (most recent call last):
    trilemma.base.errors.ConfigError: unknown shape 'sqare': did you mean 'square'? Allowed: square
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._things: dict[str, T] = {}
        self._summaries: dict[str, str] = {}

    def register(self, name: str, summary: str = "") -> Callable[[T], T]:
        """Return a decorator that enters a thing under `name`."""

        def enter(thing: T) -> T:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{self.kind} {name!r}: allowed in a name are letters, digits, . _ + -")
            if inspect.isabstract(thing):
                missing = ", ".join(sorted(getattr(thing, "__abstractmethods__", ())))
                raise ConfigError(f"{self.kind} {name!r} does not define {missing}")
            if name in self._things:
                raise ConfigError(
                    f"{self.kind} {name!r} is registered twice: by {_origin(self._things[name])} and by "
                    f"{_origin(thing)}; give one of them another name"
                )
            self._things[name] = thing
            self._summaries[name] = printable(summary or (thing.__doc__ or "").strip().split("\n")[0])
            for entered in _watched:
                entered.append((self, name))
            return thing

        return enter

    def withdraw(self, name: str) -> None:
        """Forget what is registered under `name`."""
        del self._things[name], self._summaries[name]

    def summary(self, name: str) -> str:
        """Return the one line that describes `name`."""
        self[name]
        return self._summaries[name]

    def validate(self, name: str) -> str:
        """Return `name` if something is registered under it, else say what is: a validator of fields."""
        if name not in self:
            raise ValueError(nearest(name, self))
        return name

    def __getitem__(self, name: str) -> T:
        try:
            return self._things[name]
        except KeyError:
            raise ConfigError(f"unknown {self.kind} {name!r}: {nearest(name, self._things)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)


_NAME = re.compile(r"[\w.+-]+")
_watched: list[list[tuple[Registry[Any], str]]] = []


@contextmanager
def all_or_nothing() -> Iterator[list[tuple[Registry[Any], str]]]:
    """Collect what is registered inside; withdraw all of it where an error leaves the block.

    >>> shapes: Registry[str] = Registry("shape")
    >>> with all_or_nothing() as entered:
    ...     _ = shapes.register("square")("four equal sides")
    >>> [(registry.kind, name) for registry, name in entered]
    [('shape', 'square')]
    """
    entered: list[tuple[Registry[Any], str]] = []
    _watched.append(entered)
    try:
        yield entered
    except BaseException:
        for registry, name in entered:
            registry.withdraw(name)
        raise
    finally:
        _watched.pop()


def _origin(thing: object) -> str:
    """Say where a thing was defined: a module of the package, or else a file."""
    module = getattr(thing, "__module__", None) or type(thing).__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    return module if file is None or module.split(".")[0] == "trilemma" else str(file)


def discover(package: str, but: Collection[str] = ()) -> None:
    """Import every module of `package`, so that what they register is known; `but` names those left alone.

    A module that nothing else may import, because it needs a device or takes long, is left alone.
    """
    path = importlib.import_module(package).__path__
    for module in pkgutil.iter_modules(path):
        if module.name not in but:
            importlib.import_module(f"{package}.{module.name}")
