"""A user's own code: `task.py` and the files beside it, imported without touching anybody else's modules.

`import helpers` in a `task.py` means the `helpers.py`, or the package `helpers/`, beside it, as in a script.
Several tasks may live in one process, each with `helpers` of its own, and the process may have modules of
that name too: so a task's modules are in `sys.modules` only while its code is called, and its folder is on
`sys.path` only then. Names of the standard library always mean the standard library.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import pkgutil
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from trilemma.base.errors import UserError, hint

_ONE_AT_A_TIME = threading.RLock()

NAMES = (
    "model",
    "data",
    "records",
    "examples",
    "loss",
    "metrics",
    "test",
    "prepare",
    "classes",
    "clients",
    "target",
    "label",
    "length",
    "coupled",
    "expects",
)
"""What a `task.py` may define; anything else is its own business."""


class TaskFile:
    """A `task.py` that was imported, and the modules beside it.

    Its `prepare`, where there is one, is called once, before the first of its other functions.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"there is no {path}")
        if path.suffix != ".py":
            raise UserError(f"{path} is no task: allowed is a Python file that defines model() and data()")
        self.path = path.resolve()
        self._modules: dict[str, ModuleType] = {}
        self._prepared = False
        with self._importable():
            try:
                self._task = importlib.import_module(self.path.stem)
            except SyntaxError as error:
                raise UserError(_syntax(path, error)) from error
            except (Exception, SystemExit) as error:
                line = self._line(error)
                raise UserError(
                    f"{path} cannot be imported{line}: {type(error).__name__}: {error}"
                ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one of its functions; what that imports may be beside it too."""
        if not self._prepared:
            self._prepared = True
            if self.has("prepare"):
                self.call("prepare")
        function = self.require(name)
        with self._importable():
            try:
                return function(*arguments)
            except UserError:
                raise
            except (Exception, SystemExit) as error:
                # A client's number, but never its records.
                said = ", ".join(repr(one) if isinstance(one, int) else "…" for one in arguments)
                raise UserError(
                    f"{self.path.name}: {name}({said}) failed{self._line(error)}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def require(self, name: str) -> Any:
        """Return a function that the file must define."""
        function = getattr(self._task, name, None)
        if not callable(function):
            near = hint(name, (own for own in vars(self._task) if not own.startswith("_")))
            raise UserError(f"{self.path.name} must define a function `{name}`; {near}see docs/own-task.md")
        return function

    def has(self, name: str) -> bool:
        """Tell whether the file defines `name`."""
        return getattr(self._task, name, None) is not None

    def value(self, name: str) -> Any:
        """Return what the file calls `name`; None where it calls nothing so."""
        return getattr(self._task, name, None)

    def _line(self, error: BaseException) -> str:
        """Say where in the task an error came up."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if Path(frame.filename).parent == self.path.parent:
                return f" in {Path(frame.filename).name}, line {frame.lineno}"
        return ""

    @contextmanager
    def _importable(self) -> Iterator[None]:
        """Put this task's modules in the place of others of their names, for a while."""
        folder = str(self.path.parent)
        with _ONE_AT_A_TIME:
            own = _beside(self.path.parent)
            others = _take(own)
            sys.modules.update(self._modules)
            finder = _Finder(folder)
            sys.meta_path.insert(0, finder)
            sys.path.insert(0, folder)
            importlib.invalidate_caches()
            try:
                yield
            finally:
                sys.path.remove(folder)
                sys.meta_path.remove(finder)
                self._modules = _take(own)
                sys.modules.update(others)


def _syntax(path: Path, error: SyntaxError) -> str:
    """Say where a file is no Python, and show the line with a mark below what is wrong."""
    name = path.name if error.filename is None else Path(error.filename).name
    said = f"{path} cannot be imported: {name}, line {error.lineno}: {error.msg}"
    if not error.text:
        return said
    bare = error.text.strip()
    mark = " " * max(0, (error.offset or 1) - 1 - (len(error.text) - len(error.text.lstrip()))) + "^"
    return f"{said}\n    {bare}\n    {mark}"


class _Finder(MetaPathFinder):
    """Finds modules beside a task by their sources; none stands in for one of the standard library."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where such a module is; None for everybody else's, and for what Python has built in."""
        if path is None and name in sys.stdlib_module_names:
            return PathFinder.find_spec(name, [one for one in sys.path if one != self._folder])
        inside = [self._folder] if path is None else [one for one in path if self._holds(one)]
        spec = PathFinder.find_spec(name, inside) if inside else None
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = _FromSource(spec.loader.name, spec.loader.path)
        return spec

    def _holds(self, folder: str) -> bool:
        return Path(folder).is_relative_to(self._folder)


class _FromSource(SourceFileLoader):
    """Compiles a module anew, whatever was compiled before.

    Python tells a stale `.pyc` by the size and the second of its source. A source that was changed within
    the second would not run, and one who may write there could have other code run than its owner allowed.
    """

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        """Say that nothing is known by which to tell what was compiled before."""
        raise OSError


def _beside(folder: Path) -> set[str]:
    """Return the names that can be imported from a folder.

    A folder of modules that is no package gives way to any package of its name, wherever that is.
    """
    files = {path.stem for path in folder.glob("*.py")}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    loose = {path.parent.name for path in folder.glob("*/*.py")}
    elsewhere = {name for name in loose if getattr(sys.modules.get(name), "__file__", None) is not None}
    return (files | packages | loose - elsewhere) - sys.stdlib_module_names


def _take(names: set[str]) -> dict[str, ModuleType]:
    """Take the modules of these names, and those inside them, out of `sys.modules`."""
    taken = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in taken}


def sources(path: Path) -> list[Path]:
    """Return a `task.py` and, of the files beside it, those that it imports, and that these import.

    Whatever a module in a package is called, it is the task's own; a folder of modules need not be a package.
    """
    PathFinder.invalidate_caches()
    found, waiting = {path}, [(path, "")]
    while waiting:
        for module in _imported(*waiting.pop(), path.parent):
            if module[0] not in found:
                found.add(module[0])
                waiting.append(module)
    return [path, *sorted(found - {path})]


def _imported(file: Path, package: str, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the modules beside a task that one of them, in `package`, imports: their files and packages."""
    if file.suffix != ".py":
        return
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{file} cannot be imported: {error}") from None
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                yield from _modules(one.name, folder)
        elif isinstance(node, ast.ImportFrom):
            try:
                name = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue  # above the topmost package: it fails when it is run
            for one in node.names:
                yield from _modules(f"{name}.{one.name}", folder)


def _modules(name: str, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the modules on the way to `name`, those that are beside a task: their files and packages."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return
    search, whole = [str(folder)], ""
    for part in name.split("."):
        if part == "*":
            for one in pkgutil.iter_modules(search):
                yield from _modules(f"{whole}.{one.name}", folder)
            return
        spec = PathFinder.find_spec(part, search)
        if spec is None:
            return
        before, whole = whole, f"{whole}.{part}".removeprefix(".")
        inside = spec.submodule_search_locations
        search = list(inside or ())
        if spec.origin is not None:
            yield Path(spec.origin), before if inside is None else whole


def copy_task(path: Path, folder: Path, name: str) -> None:
    """Copy a `task.py` into a folder as `name`, and of the files beside it those that it imports."""
    path = path.resolve()
    for source in sources(path):
        target = folder / (name if source == path else source.relative_to(path.parent))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def task_digest(path: Path) -> str:
    """Return a digest of a `task.py` and what it imports of the files beside it; not of its data."""
    digest = hashlib.sha256()
    for source in sources(path.resolve()):
        content = source.read_bytes()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()
