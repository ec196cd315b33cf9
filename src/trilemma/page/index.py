"""What lies below the watched folders: runs and parties, each under an id of its own.

Nothing is found by a path that somebody sends: an id is looked up among what was found, or is nobody's. What
was read of a run is kept until one of its files changes.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from trilemma.base.errors import UserError, printable
from trilemma.base.files import ends
from trilemma.base.records import Record
from trilemma.experiment.sweep import worded
from trilemma.federation.party.layout import CONFIG, PARTY_NAME, party_folders
from trilemma.federation.party.public_facts import PUBLIC
from trilemma.report import run_metadata as reading
from trilemma.report.run_metadata import RunMetadata
from trilemma.simulate.sweep import known_cells
from trilemma.simulate.sweep.grid import SWEEP

DEEPEST = 8
"""How far below a watched folder runs are looked for."""

MOST = 20_000
"""Folders that are looked into at most."""

INSIDE = frozenset({reading.BASELINE, "task", "tensorboard", "transcript"})
"""Folders of a run that hold no other runs."""

FRESH = 0.5
"""Seconds for which what was found counts as found."""

Stamp = tuple[tuple[int, int, int], ...]
"""What tells one state of some files from another."""

Kind = Literal["run", "deployed", "party"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class WatchedRun:
    """Something below a watched folder: a run, a run in a server's folder, or a party's folder."""

    id: str
    name: str
    folder: Path
    kind: Kind
    title: str = ""
    """What to call it: a cell of a sweep by what is its own, not by a digest."""

    @classmethod
    def at(cls, folder: Path, kind: Kind, root: Path, called: str = "") -> WatchedRun:
        """Name what lies in `folder`: by its path below the watched folder, in letters that can be shown."""
        digest = hashlib.blake2b(os.fsencode(folder), digest_size=10).hexdigest()
        below = folder.relative_to(root)
        parts = [part for part in below.parts if kind != "deployed" or part not in ("state", "runs")]
        name = shown("/".join([called or root.name, *parts]))
        return cls(digest, name, folder, kind, name)

    def files(self) -> list[Path]:
        """Return the files whose change means that the thing has changed."""
        if self.kind == "deployed":
            return [self.folder / "rounds.jsonl", self.folder / "result", self.folder]
        if self.kind == "party":
            log = self.folder / "run" / "node.log"
            return [self.folder / "state" / "ledger", log, self.folder / "state" / "runs", self.folder]
        seeds = sorted(self.folder.glob("seed-*/metrics.jsonl"))
        return [self.folder / "config.toml", self.folder / "summary.json", *seeds]

    def all_files(self) -> list[Path]:
        """Return the files that may be read of a run."""
        beside = self.folder / reading.BASELINE
        config = self.folder.parents[2] / CONFIG if self.kind == "deployed" else beside / CONFIG
        return [*self.files(), config, *beside.glob("seed-*/metrics.jsonl")]


def shown(text: str) -> str:
    r"""Return a name as it can be shown: what no character stands for, or steers a terminal, is written out.

    >>> shown("a\udcffb\x1b")
    'a\\udcffb\\x1b'
    """
    return printable(text.encode("utf-8", "backslashreplace").decode())


def names_of(roots: Sequence[Path]) -> list[str]:
    """Return what watched folders are called: those of one name with the folders above that tell them apart.

    >>> names_of([Path("/lab/runs"), Path("/ward/runs"), Path("/ward/old")])
    ['runs (lab)', 'runs (ward)', 'old']
    """
    found = []
    for root in roots:
        others = [one for one in roots if one != root and one.name == root.name]
        depth = 1
        while depth < len(root.parts) and any(one.parts[-depth:] == root.parts[-depth:] for one in others):
            depth += 1
        above = "/".join(root.parts[-depth:-1])
        found.append(f"{root.name} ({above})" if above else root.name)
    return found


def find(root: Path, called: str = "") -> Iterator[WatchedRun]:
    """Yield what lies in `root` and below it; links are not followed."""
    waiting, seen = [(root, 0)], 0
    cells: dict[Path, Mapping[str, Mapping[str, Any]]] = {}
    while waiting and seen < MOST:
        folder, depth = waiting.pop()
        seen += 1
        try:
            with os.scandir(folder) as entries:
                names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            continue
        if PUBLIC in names or (CONFIG in names and _lacks_its_facts(folder, names, root)):
            yield WatchedRun.at(folder, "party", root, called)
            if folder.name == "server" and names.get("state"):
                runs = _deployed(folder / "state" / "runs")
                yield from (WatchedRun.at(run, "deployed", root, called) for run in runs)
            continue
        if CONFIG in names:
            one = WatchedRun.at(folder, "run", root, called)
            own = cells[folder.parent].get(folder.name, {}) if folder.parent in cells else {}
            title = ", ".join(f"{key.rpartition('.')[2]} {worded(value)}" for key, value in own.items())
            yield replace(one, title=f"{one.name.rpartition('/')[0]}: {shown(title)}") if title else one
        if SWEEP in names and (known := _cells(folder)):
            cells[folder] = known
        if depth < DEEPEST:
            below = [name for name, is_folder in names.items() if is_folder and not _inside(name)]
            waiting += [(folder / name, depth + 1) for name in sorted(below, reverse=True)]


def _lacks_its_facts(folder: Path, names: Mapping[str, bool], root: Path) -> bool:
    """Tell a party without its public facts from a run: by secrets, or by name beside another party."""
    if names.get("secrets"):
        return True
    if folder == root or not PARTY_NAME.fullmatch(folder.name):
        return False
    try:
        return folder in party_folders(folder.parent)
    except UserError:
        return False


def _cells(sweep: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return what is each cell's own in a sweep; nothing where that cannot be read."""
    try:
        return known_cells(sweep) if ends(sweep / SWEEP) else {}
    except UserError:
        return {}


def _deployed(runs: Path) -> list[Path]:
    """Return the folders of a server's runs; a link to a folder elsewhere is none."""
    if runs.is_symlink():
        return []
    try:
        with os.scandir(runs) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _inside(name: str) -> bool:
    return name.startswith((".", "seed-")) or name in INSIDE


def stamp(paths: Sequence[Path]) -> Stamp:
    """Return inode, time and size of each file; zeros where there is none."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        facts = path.stat()
    except OSError:
        return (0, 0, 0)
    return (facts.st_ino, facts.st_mtime_ns, facts.st_size)


class Index:
    """What is watched. Any number of threads may ask."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = list(dict.fromkeys(root.resolve() for root in roots))
        self.names = names_of(self.roots)
        self.version = 0
        self._lock = threading.RLock()
        self._looked = -FRESH
        self._found: dict[str, WatchedRun] = {}
        self._stamps: dict[str, Stamp] = {}
        self._kept: OrderedDict[tuple[str, str], tuple[Stamp, object]] = OrderedDict()

    def fresh(self) -> int:
        """Look again, unless that was done a moment ago; return the version: every change counts it up."""
        with self._lock:
            if time.monotonic() - self._looked >= FRESH:
                named = zip(self.roots, self.names, strict=True)
                found = {one.id: one for root, called in named for one in find(root, called)}
                stamps = {id_: stamp(one.files()) for id_, one in found.items()}
                if stamps != self._stamps:
                    self.version += 1
                self._found, self._stamps = found, stamps
                self._looked = time.monotonic()
            return self.version

    def all(self, *kinds: Kind) -> list[WatchedRun]:
        """Return everything of these kinds, what changed last first."""
        self.fresh()
        with self._lock:
            chosen = [one for one in self._found.values() if one.kind in kinds]
            return sorted(chosen, key=lambda one: (-self.changed(one), one.name))

    def changed(self, one: WatchedRun) -> int:
        """Return when something was last written there, in nanoseconds since 1970."""
        return max(part[1] for part in self._stamps[one.id])

    def get(self, id_: str, *kinds: Kind) -> WatchedRun | None:
        """Return what has this id; None where nothing has."""
        self.fresh()
        one = self._found.get(id_)
        return one if one is not None and one.kind in kinds else None

    def metadata(self, one: WatchedRun) -> RunMetadata | UserError:
        """Look at a run, or say why it cannot be read."""
        return self._keep("metadata", one, lambda: _metadata(one))

    def records(self, one: WatchedRun) -> Mapping[int, Sequence[Record]]:
        """Return every record of a run that can be read."""
        config = _must(self.metadata(one)).config
        read = reading.deployed_records if one.kind == "deployed" else reading.simulated_records
        return self._keep("records", one, lambda: read(config, one.folder), most=12)

    def _keep(self, what: str, one: WatchedRun, read: Callable[[], Value], most: int = 4000) -> Value:
        """Return what was read of a run before, unless its files have changed since."""
        now = stamp(one.files())
        with self._lock:
            kept = self._kept.get((what, one.id))
        if kept is not None and kept[0] == now:
            return kept[1]  # type: ignore[return-value]
        value = read()
        with self._lock:
            self._kept[what, one.id] = (now, value)
            self._kept.move_to_end((what, one.id))
            older = [key for key in self._kept if key[0] == what]
            for key in older[: max(0, len(older) - most)]:
                del self._kept[key]
        return value


def _metadata(one: WatchedRun) -> RunMetadata | UserError:
    endless = [path for path in one.all_files() if not ends(path)]
    try:
        if endless:
            raise UserError(f"{shown(endless[0].name)} is no file")
        if one.kind == "deployed":
            return reading.deployed_metadata(one.folder.parents[2], one.folder)
        return reading.run_metadata(one.folder)
    except UserError as error:
        return error


def _must(found: RunMetadata | UserError) -> RunMetadata:
    if isinstance(found, UserError):
        raise found
    return found
