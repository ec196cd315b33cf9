"""Real processes, each the leader of its own process group, remembered on disk.

A started process is recorded as (pid, start time): a recycled pid is never mistaken for ours, and nothing is
ever looked up or stopped by name. Stopping means the whole group, first politely, then not, within a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trilemma.errors import UserError

PROC = Path("/proc")


class ProcessFailed(UserError):
    """A process of the federation did not come up; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Command:
    """Something to start: its name within the party, its arguments and what it adds to the environment."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Running:
    """A started process. Its pid is also the id of its process group."""

    name: str
    pid: int
    started: str
    log: str


@dataclass(frozen=True)
class _Seen:
    """A line of the process table."""

    pid: int
    group: int
    zombie: bool
    started: str


def _table() -> list[_Seen]:
    """Read the process table: from /proc where there is one, else from ps."""
    if not PROC.joinpath("self/stat").exists():
        return _table_from_ps()
    seen = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            # The command's name is in parentheses and may itself contain any character.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            seen.append(_Seen(int(entry.name), int(fields[2]), fields[0] in "ZX", fields[19]))
    return seen


def _table_from_ps() -> list[_Seen]:
    text = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid=,stat=,lstart="], check=True, capture_output=True, text=True
    ).stdout
    rows = (line.split(None, 3) for line in text.splitlines())
    return [_Seen(int(pid), int(group), stat.startswith("Z"), at) for pid, group, stat, at in rows]


def members(running: Running) -> list[int]:
    """Return the live processes of the group `running` leads, the leader first where it lives.

    >>> members(Running("ghost", pid=2**22 + 1, started="0", log=""))
    []
    """
    with contextlib.suppress(ChildProcessError):
        os.waitpid(running.pid, os.WNOHANG)  # a dead child of ours would stay in the table as a zombie
    group = [row for row in _table() if row.group == running.pid]
    leader = next((row for row in group if row.pid == running.pid), None)
    if leader is not None and leader.started != running.started:
        return []  # the pid was recycled: this group is somebody else's
    return sorted((row.pid for row in group if not row.zombie), key=lambda pid: pid != running.pid)


def leads(running: Running) -> bool:
    """Tell whether the process itself, not only something it left behind, is alive."""
    return running.pid in members(running)


def start(command: Command, folder: Path) -> Running:
    """Start `command` in its own process group; remember it and its log in `folder`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> sleeper = start(Command("sleeper", ("sleep", "60")), folder)
    >>> leads(sleeper), [known.name for known in recorded(folder)]
    (True, ['sleeper'])
    >>> stop([sleeper], folder); leads(sleeper), recorded(folder)
    (False, [])
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{command.name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment},
            start_new_session=True,
        )
    started = next((row.started for row in _table() if row.pid == process.pid), "")
    process.returncode = 0  # its end is observed through the process table, not through this object
    running = Running(command.name, process.pid, started, str(log))
    _write_atomically(folder / f"{command.name}.json", json.dumps(asdict(running)))
    return running


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def recorded(folder: Path) -> list[Running]:
    """Return every process remembered in `folder`, alive or not, by name."""
    return [Running(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def signal_all(running: Iterable[Running], how: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to each whole group that is still there."""
    for one in running:
        if members(one):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, how)


def stop(running: Iterable[Running], folder: Path, grace: float = 5.0) -> None:
    """Stop the groups: SIGTERM, SIGKILL after `grace` seconds, and forget them once they are gone."""
    pending = list(running)
    for how, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        pending = [one for one in pending if members(one)]
        signal_all(pending, how)
        deadline = time.monotonic() + patience
        while any(members(one) for one in pending) and time.monotonic() < deadline:
            time.sleep(0.05)
    for one in recorded(folder):
        if not members(one):
            (folder / f"{one.name}.json").unlink(missing_ok=True)
    if left := [one.name for one in pending if members(one)]:
        raise ProcessFailed(f"could not stop {', '.join(left)}: processes survived SIGKILL")


def tail(log: str, lines: int = 12) -> str:
    """Return the last lines of a log.

    >>> tail("/does/not/exist")
    '(no log)'
    """
    try:
        return "\n".join(Path(log).read_text(errors="replace").splitlines()[-lines:]) or "(empty log)"
    except OSError:
        return "(no log)"
