"""Rules, attacks, algorithms, data sets and models of one's own, from files, modules and installed packages.

A plugin registers into the same registries as everything here (`@rules.register("mine")`), so configurations,
listings, error messages and the shared suites find what it brings. It is named by

* a file: `my_rules.py`; with `#sha256=…` behind it, the file must have that digest;
* an importable module: `package.module`; with `==1.2` behind it, its package must have that version;
* nothing, where an installed package declares an entry point in a group of `GROUPS`.

A plugin is code, and runs as such: load only what you would run.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trilemma.base import files
from trilemma.base.errors import ConfigError
from trilemma.base.registry import all_or_nothing

GROUPS = tuple(
    f"trilemma.{kind}"
    for kind in (
        "rules", "mixing", "attacks", "algorithms", "data", "partitions", "features", "models", "metrics",
        "accountants", "threats",
    )
)  # fmt: skip
"""Entry points an installed package may declare: each names a module, which registers when imported.

Two groups more name objects: `trilemma.commands` (a function or a typer group, for the command line) and
`trilemma.studies` (how the page lays out the runs of a study: `trilemma.page.studies.StudyLayout`).
"""


@dataclass(frozen=True)
class Plugin:
    """A plugin that is loaded: what it is called, which edition of it, and what it registered.

    `edition` is the digest of a file, or the version of a module's package, "" where it has none. `file` is
    where the file was read and `content` what stood there.
    """

    name: str
    edition: str
    entries: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False)
    file: Path | None = field(default=None, compare=False)
    content: bytes = field(default=b"", repr=False, compare=False)

    @property
    def reference(self) -> str:
        """What to write into a configuration that lies beside a copy of the file.

        >>> Plugin("my_rules.py", "ab12", file=Path("/home/me/my_rules.py")).reference
        'my_rules.py#sha256=ab12'
        >>> Plugin("package.module", "1.2").reference
        'package.module==1.2'
        """
        if self.file is not None:
            return f"{self.name}#sha256={self.edition}"
        return f"{self.name}=={self.edition}" if self.edition else self.name

    @property
    def located(self) -> str:
        """The reference with the file's whole path: what to write where there is no copy."""
        return self.reference if self.file is None else f"{self.file}#sha256={self.edition}"

    def copy_into(self, folder: Path) -> None:
        """Write the plugin's file into `folder`, as it was when it was loaded; a module stays where it is."""
        if self.file is not None:
            files.write_atomically(folder / self.name, self.content)


def load(references: Iterable[str], beside: Path | None = None) -> tuple[Plugin, ...]:
    """Load plugins in order; relative paths of files start at `beside`, or where this process works.

    A plugin that is loaded already is not loaded again; another edition of it is refused.
    """
    plugins = tuple(dict.fromkeys(_load(reference, beside or Path()) for reference in references))
    names = [plugin.name for plugin in plugins]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two plugins are called {name!r}: their copies could not be told apart")
    return plugins


@cache
def installed() -> tuple[Plugin, ...]:
    """Load the plugins that installed packages declare as entry points."""
    found = {
        point.module: point.dist
        for group in GROUPS
        for point in importlib.metadata.entry_points(group=group)
        if not point.module.startswith("trilemma.")
    }
    return tuple(_module(name, dist.version if dist else "") for name, dist in sorted(found.items()))


@cache
def offered(group: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return what installed packages offer in a group of entry points, by name; nothing is imported."""
    return {point.name: point for point in importlib.metadata.entry_points(group=f"trilemma.{group}")}


def _load(reference: str, beside: Path) -> Plugin:
    """Load a file, or an installed module, by what a configuration calls it; refuse another edition."""
    name, mark, digest = reference.partition("#sha256=")
    if mark or name.endswith(".py") or "/" in name or "\\" in name:
        return _file(beside / Path(name).expanduser(), digest)
    module, equals, version = name.partition("==")
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
        raise ConfigError(f"plugin {reference!r}: allowed are a .py file and a module, as in package.module")
    plugin = _module(module, _version(module))
    if equals and plugin.edition != version:
        raise ConfigError(
            f"plugin {module} was recorded in version {version}; installed is {plugin.edition or 'none'}"
        )
    return plugin


_loaded: dict[tuple[str, str], frozenset[tuple[str, str]]] = {}
"""What each plugin of this process registered, by name of the module and edition."""


def _file(path: Path, recorded: str) -> Plugin:
    """Load a .py file; where a digest is `recorded`, only with exactly that content."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"plugin {path} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(content).hexdigest()
    if recorded and digest != recorded:  # before any of it runs
        raise ConfigError(
            f"plugin {path} has changed since it was recorded (sha256 {recorded[:12]}…, now {digest[:12]}…); "
            "allowed: the file as it was, or a new run"
        )
    module = f"plugin_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{digest[:12]}"

    def run() -> None:
        # What was hashed is what runs: the file is not read a second time.
        made = ModuleType(module)
        made.__file__ = str(path)
        sys.modules[module] = made
        try:
            exec(compile(content, str(path), "exec"), made.__dict__)
        except BaseException:
            del sys.modules[module]
            raise

    entries = _once((module, digest), run, str(path))
    return Plugin(path.name, digest, entries, path.resolve(), content)


def _module(name: str, version: str) -> Plugin:
    return Plugin(name, version, _once((name, version), lambda: importlib.import_module(name), name))


def _once(key: tuple[str, str], run: Callable[[], Any], where: str) -> frozenset[tuple[str, str]]:
    """Run a plugin unless it has run; a failure is told with its file and line and leaves nothing behind."""
    if key not in _loaded:
        try:
            with all_or_nothing() as entered:
                run()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"plugin {_place(error, where)}: {_reason(error)}") from error
        _loaded[key] = frozenset((registry.kind, name) for registry, name in entered)
    return _loaded[key]


def _place(error: BaseException, where: str) -> str:
    """Say in which line of the plugin an error arose: that of its innermost frame there."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    here = Path(__file__).parents[1]
    own = [f for f in frames if here not in Path(f.filename).parents and "importlib" not in f.filename]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else where


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def _version(module: str) -> str:
    """Return the version of the package a module belongs to, "" where nobody says."""
    for distribution in _distributions(tuple(sys.path)).get(module.split(".")[0], ()):
        return importlib.metadata.version(distribution)
    return ""


@cache
def _distributions(_on_path: tuple[str, ...]) -> Mapping[str, Sequence[str]]:
    """Return the packages that modules belong to; to find out, every installed file is looked at."""
    return importlib.metadata.packages_distributions()
