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

import psutil

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.base.typed import Count, typed

KILLED = 30.0
"""Seconds in which what was killed must be gone: a busy machine takes its time over large processes."""


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
    pid: Count
    started: str
    log: str


def _group(leader: int) -> list[int]:
    """Return the processes of the group that `leader` leads or led, the dead ones included."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def _started(pid: int) -> str:
    """Return when a process was started; "" where there is none."""
    with contextlib.suppress(psutil.Error):
        # Counted from the start of the machine: the time of day may be set while a process runs.
        return f"{psutil.Process(pid).create_time() - psutil.boot_time():.2f}"
    return ""


def _lives(pid: int) -> bool:
    """Tell whether a process has not ended, all of it.

    The system calls it a zombie as soon as its first thread has ended; its ports and its locks are free once
    the others have too.
    """
    with contextlib.suppress(psutil.Error):
        one = psutil.Process(pid)
        ended = one.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return not ended or one.num_threads() > 1
    return False


def members(running: Running) -> list[int]:
    """Return the live processes of the group `running` leads, the leader first where it lives.

    >>> members(Running("ghost", pid=2**22 + 1, started="0", log=""))
    []
    """
    with contextlib.suppress(ChildProcessError):
        os.waitpid(running.pid, os.WNOHANG)  # a dead child of ours would stay in the table as a zombie
    group = _group(running.pid)
    if running.pid in group and _started(running.pid) != running.started:
        return []  # the pid was recycled: this group is somebody else's
    return sorted((pid for pid in group if _lives(pid)), key=lambda pid: pid != running.pid)


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
    one = spawn(command, folder)
    remember(one, folder)
    return one


def spawn(command: Command, folder: Path) -> Running:
    """Start `command` in its own process group, with a log in `folder`; it writes down itself that it is."""
    with log_of(command.name, folder).open("ab") as output:
        process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment},
            start_new_session=True,
        )
    process.returncode = 0  # its end is observed through the process table, not through this object
    return seen(command.name, process.pid, folder)


def log_of(name: str, folder: Path) -> Path:
    """Return where a process writes; `folder` is there then."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"


def seen(name: str, pid: int, folder: Path) -> Running:
    """Return a process as it is now."""
    return Running(name, pid, _started(pid), str(log_of(name, folder)))


def remember(running: Running, folder: Path) -> None:
    """Write down a process that was started."""
    files.write_atomically(folder / f"{running.name}.json", json.dumps(asdict(running)).encode())


def forget(running: Running, folder: Path) -> None:
    """Take away what was written down about a process that ends."""
    (folder / f"{running.name}.json").unlink(missing_ok=True)


def recorded(folder: Path) -> list[Running]:
    """Return every process remembered in `folder`, alive or not, by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with files.readable(path, "a process that was started"):
            found.append(typed(Running, json.loads(path.read_text("utf-8"))))
    return found


def signal_all(running: Iterable[Running], how: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to each whole group that is still there."""
    for one in running:
        if members(one):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, how)


def stop(running: Iterable[Running], folder: Path, grace: float = 5.0) -> None:
    """Stop the groups: SIGTERM, SIGKILL after `grace` seconds, and forget them once they are gone."""
    pending = list(running)
    for how, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, KILLED)):
        pending = [one for one in pending if members(one)]
        signal_all(pending, how)
        deadline = time.monotonic() + patience
        while any(members(one) for one in pending) and time.monotonic() < deadline:
            time.sleep(0.05)
    for one in recorded(folder):
        if not members(one):
            forget(one, folder)
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
