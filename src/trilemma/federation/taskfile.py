"""A party's own code: `task.py` and the files beside it, imported without touching anybody else's modules.

`import helpers` in a `task.py` means the `helpers.py`, or the package `helpers/`, beside it, as in a script.
Two parties may live in one process, each with `helpers` of its own, and the process may have modules of that
name too: so a party's modules are in `sys.modules` only while its code is called, and its folder is on
`sys.path` only then. Names of the standard library always mean the standard library.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trilemma.errors import UserError

_ONE_AT_A_TIME = threading.RLock()


class TaskFile:
    """A `task.py` that was imported, and the modules beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._modules: dict[str, ModuleType] = {}
        with self._importable():
            try:
                self._task = importlib.import_module(path.stem)
            except Exception as error:
                raise UserError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one of its functions; what that imports may be beside it too."""
        function = getattr(self._task, name, None)
        if not callable(function):
            raise UserError(f"{self.path.name} must define a function `{name}`; see docs/federation.md")
        with self._importable():
            return function(*arguments)

    @contextmanager
    def _importable(self) -> Iterator[None]:
        """Put this party's modules in the place of others of their names, for a while."""
        folder = str(self.path.parent)
        with _ONE_AT_A_TIME:
            own = _beside(self.path.parent)
            others = _take(own)
            sys.modules.update(self._modules)
            sys.path.insert(0, folder)
            importlib.invalidate_caches()
            try:
                yield
            finally:
                sys.path.remove(folder)
                self._modules = _take(own)
                sys.modules.update(others)


def _beside(folder: Path) -> set[str]:
    """Return the names that can be imported from a folder."""
    files = {path.stem for path in folder.glob("*.py")}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return (files | packages) - sys.stdlib_module_names


def _take(names: set[str]) -> dict[str, ModuleType]:
    """Take the modules of these names, and those inside them, out of `sys.modules`."""
    taken = [name for name in sys.modules if name.partition(".")[0] in names]
    return {name: sys.modules.pop(name) for name in taken}


def copy_task(path: Path, folder: Path, name: str) -> None:
    """Copy a `task.py` into a party's folder as `name`, and of the files beside it those that it imports."""
    shutil.copyfile(path, folder / name)
    finder = ModuleFinder([str(path.parent)])
    try:
        finder.run_script(str(path))
    except SyntaxError as error:
        raise UserError(f"{path} cannot be imported: {error}") from None
    for module in finder.modules.values():
        source = Path(getattr(module, "__file__", None) or path)
        if source != path and source.stem not in sys.stdlib_module_names:
            target = folder / source.relative_to(path.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
