"""Which sources make a study's results, and which of them have changed since.

A run is made by what every run goes through, found by following imports from the engine, and by what its
configuration names: a rule, an attack, an algorithm, a model, data. The files of other rules and attacks are
not among its sources. What is computed without runs is made by the module that computes it and what that
imports. Comments, docstrings and empty lines do not count.

The package is read once in a process: what runs is what was there when it began, whatever is written into the
files meanwhile.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trilemma
import trilemma_lab
from trilemma.aggregation import mixings, rules
from trilemma.attacks import attacks
from trilemma.data.catalogue import datasets, feature_maps, partitions
from trilemma.learning import algorithms
from trilemma.models import models
from trilemma.privacy.accounting.accountants import accountants

ENTRIES = ("trilemma.simulate.runner",)
"""Where a run begins."""

BOOKKEEPING = ("trilemma_lab.studies.measured", "trilemma_lab.studies.study", "trilemma_lab.studies.sources")
"""Modules that write results down and decide none."""

ROOTS = (Path(trilemma.__file__).parent, Path(trilemma_lab.__file__).parent)
"""The folders of the two packages."""

REGISTRIES: tuple[Mapping[str, Any], ...] = (
    *(rules, mixings, attacks, algorithms, models),
    *(datasets, partitions, feature_maps, accountants),
)

Sources = Mapping[str, str]
"""A digest of every source, by its path in the package."""


def sources_of(settings: Iterable[Mapping[str, Any]], compute: str = "", root: Path | None = None) -> Sources:
    """Return the sources of runs of these settings, or of what the module `compute` computes.

    >>> found = sources_of([{"aggregation.rule": "nnm+cwmed", "attack.name": "sf"}])
    >>> [f"aggregation/{name}.py" in found for name in ("mixing", "coordinate", "passes/gram", "smea")]
    [True, True, True, False]
    """
    tree = own_tree() if root is None else _Tree(root, *ROOTS[1:])
    reached = tree.reached([*([compute] if compute else ENTRIES), *_named(settings)])
    return {tree.path(module): tree.digest(module) for module in sorted(reached)}


def changed(then: Sources, now: Sources) -> list[str]:
    """Return the sources that are not what they were, that are new and that are gone.

    >>> changed({"a.py": "1", "b.py": "2"}, {"a.py": "1", "b.py": "3", "c.py": "4"})
    ['b.py', 'c.py']
    """
    return sorted(path for path in {*then, *now} if then.get(path) != now.get(path))


def code_of(sources: Sources) -> str:
    """Return one digest for all of them."""
    text = "".join(f"{path} {digest}\n" for path, digest in sorted(sources.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _named(settings: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the modules of all registered things whose names occur in settings."""
    words = {word for one in settings for value in one.values() for word in _words(value)}
    return {
        module
        for registry in REGISTRIES
        for name, thing in registry.items()
        if name in words and (module := getattr(thing, "__module__", type(thing).__module__))
    }


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        yield from value.split("+")  # the steps of a chain
    elif isinstance(value, Sequence):
        for one in value:
            yield from _words(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _words(one)


def digest_of(source: bytes) -> str:
    """Return eight digits of what a module says, without its comments and docstrings."""
    return _stated(source).digest


class _Tree:
    """The package's modules below a folder as they are now, and what they import of each other."""

    def __init__(self, root: Path, *others: Path) -> None:
        paths = {_dotted("trilemma", path.relative_to(root)): path for path in root.rglob("*.py")}
        self._paths = {module: path.relative_to(root).as_posix() for module, path in paths.items()}
        for other in others:  # packages beside the core, whose paths begin with their name
            found = {_dotted(other.name, path.relative_to(other)): path for path in other.rglob("*.py")}
            self._paths |= {one: path.relative_to(other.parent).as_posix() for one, path in found.items()}
            paths |= found
        self._texts = {module: path.read_bytes() for module, path in paths.items()}
        self._needed: dict[str, list[str]] = {}

    def path(self, module: str) -> str:
        """Where a module stands in the package."""
        return self._paths[module]

    def digest(self, module: str) -> str:
        """Eight digits of what a module says."""
        return _stated(self._texts[module]).digest

    def reached(self, entries: Iterable[str]) -> set[str]:
        """Return these modules and all that they need."""
        found: set[str] = set()
        waiting = [name for name in entries if name in self._paths]
        while waiting:
            module = waiting.pop()
            if module not in found:
                found.add(module)
                if module not in self._needed:
                    self._needed[module] = self._imported(module)
                waiting += self._needed[module]
        return found

    def _imported(self, module: str) -> list[str]:
        stated = _stated(self._texts[module])
        packages = {alias: whole for whole, alias in stated.imported if self._is_package(whole)}
        names = [whole.rpartition(".") for whole, _ in stated.imported if not self._is_package(whole)]
        where = {self._definer(origin, name) for origin, _, name in names}
        for alias, name in stated.used:  # privacy.calibrate: of a package that is named, only what is used
            if alias in packages:
                where.add(self._definer(packages[alias], name))
        return [one for one in where if one in self._paths and one not in BOOKKEEPING and one != module]

    def _definer(self, module: str, name: str) -> str:
        """Return the module in which a name that `module` offers is defined."""
        if f"{module}.{name}" in self._paths:
            return f"{module}.{name}"
        if self._is_package(module):
            offered = _stated(self._texts[module]).offered
            origin, _, original = offered.get(name, "").rpartition(".")
            if origin in self._paths:
                return self._definer(origin, original)
        return module

    def _is_package(self, module: str) -> bool:
        return module in self._paths and self._paths[module].endswith("__init__.py")


@cache
def own_tree() -> _Tree:
    """Read this package, the first time that it is asked for."""
    return _Tree(*ROOTS)


def _dotted(package: str, path: Path) -> str:
    parts = (package, *path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@dataclass(frozen=True)
class _Stated:
    """What a module says about others: what it imports and under which name, what it uses of those names.

    `offered` is what can be imported from it though it stands elsewhere, for type checkers too: a package
    may find its names when they are first used. `digest` are eight digits of all that it says.
    """

    imported: tuple[tuple[str, str], ...]
    used: frozenset[tuple[str, str]]
    offered: Mapping[str, str]
    digest: str


@cache
def _stated(source: bytes) -> _Stated:
    text = source.decode()
    imported: list[tuple[str, str]] = []
    offered: dict[str, str] = {}
    used: set[tuple[str, str]] = set()
    words: list[ast.stmt] = []
    for node, at_run_time in _nodes(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.add((node.value.id, node.attr))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "trilemma",
            "trilemma_lab",
        ):
            found = [(f"{node.module}.{one.name}", one.asname or one.name) for one in node.names]
            imported += found if at_run_time else []
            offered |= {alias: whole for whole, alias in found}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            words.append(node)
    digest = hashlib.sha256(_bare(text, words).encode()).hexdigest()[:8]
    return _Stated(tuple(imported), frozenset(used), offered, digest)


def _nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Walk a module from its top to its end; whether a node is more than a word to type checkers."""
    waiting = [(tree, True)]
    while waiting:
        node, at_run_time = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            at_run_time = False
        yield node, at_run_time
        waiting += [(child, at_run_time) for child in reversed([*ast.iter_child_nodes(node)])]


def _bare(text: str, words: Iterable[ast.stmt]) -> str:
    r"""Return a source without comments, empty lines and those expressions: docstrings.

    >>> _bare("'What it is.'\n\nx = 1  # why\n", ast.parse("'What it is.'").body)
    'x = 1'
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if "#" in text else ():
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in words:
        for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())
