"""The operator's door: a Unix socket by which the commands on a server's machine talk to its process.

It lies in a folder of mode 700 inside the server's, and asks the system who is at the other end: whoever is
not the server's own user, or root, hears nothing. A question is a line of JSON, an answer is lines of JSON
until the end: a run that is followed has one for each round.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trilemma.base.errors import UserError
from trilemma.federation.party.layout import Party

LARGEST = 1 << 16
"""Bytes of a question, or of a line of an answer, at most."""

PATIENCE = 10.0
"""Seconds for the first line of an answer."""

MOST = 16
"""Commands that may be there at a time."""

AWAY = 60.0
"""Seconds after which a server that does not answer is not waited for any longer."""

LOOK = 0.5
"""Seconds between two tries to reach a server that is away."""

Answer = Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]


class ServerAwayError(UserError):
    """Nobody is behind the operator's door, or it went away in the middle of an answer."""


def ask(server: Party, seconds: float | None = None, **question: Any) -> Iterator[dict[str, Any]]:
    """Ask the process of `server`, and return what it says, line by line.

    Raises:
        ServerAwayError: nobody is there, or it went away in the middle of an answer.
        TimeoutError: it said nothing for so many `seconds`.
        UserError: it refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(PATIENCE)
            with short(_folder(server)) as folder:
                line.connect(str(folder / "door"))
            line.sendall(json.dumps(question).encode() + b"\n")
            line.settimeout(seconds)
            with line.makefile("rb") as lines:
                for said in lines:
                    told = json.loads(said)
                    if "refused" in told:
                        raise UserError(told["refused"])
                    if "end" in told:
                        return
                    yield told
    except TimeoutError:
        raise
    except OSError as error:
        up = f"start it with `trilemma federation up {server.folder}`"
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            raise ServerAwayError(f"the server is not running: {up}") from None
        why = error.strerror or type(error).__name__
        raise ServerAwayError(f"the server's process does not answer ({why}): {up}") from None
    raise ServerAwayError("the server's process ended")


class Door:
    """Open from when it is made until it is closed; every question is answered in a thread of its own."""

    def __init__(self, server: Party, answer: Answer) -> None:
        self._answer, self._seats = answer, threading.BoundedSemaphore(MOST)
        self._closed = threading.Event()
        folder = _folder(server)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        self._path = folder / "door"
        self._path.unlink(missing_ok=True)  # whoever had it is gone: one process has the folder's lock
        self._socket = socket.socket(socket.AF_UNIX)
        with short(folder) as brief:
            self._socket.bind(str(brief / "door"))
        self._path.chmod(0o600)
        self._socket.listen(MOST)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                line, _ = self._socket.accept()
            except OSError:  # it was closed; or files have run out, for a while
                self._closed.wait(0.1)
                continue
            try:
                self._let_in(line)
            except (OSError, RuntimeError):  # it went away; or threads have run out
                line.close()

    def _let_in(self, line: socket.socket) -> None:
        if peer_of(line) not in (os.geteuid(), 0) or not self._seats.acquire(blocking=False):
            line.close()
            return
        try:
            threading.Thread(target=self._one, args=(line,), daemon=True).start()
        except RuntimeError:
            self._seats.release()
            raise

    def _one(self, line: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError), line, line.makefile("rb") as lines:  # it went away
                line.settimeout(PATIENCE)
                try:
                    question = json.loads(lines.readline(LARGEST))
                    for told in self._answer(question):
                        _say(line, told)
                    _say(line, {"end": True})
                except UserError as error:
                    _say(line, {"refused": str(error)})
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    _say(line, {"refused": "this is no question of this version of trilemma"})
        finally:
            self._seats.release()


def peer_of(line: socket.socket) -> int:
    """Return the user at the other end of a Unix socket, as the system has it."""
    if hasattr(socket, "SO_PEERCRED"):
        found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", found)[1])
    local_peercred = 1  # macOS and the BSDs: struct xucred, which Python has no name for
    return int(struct.unpack("2I", line.getsockopt(0, local_peercred, 8))[1])


def _say(line: socket.socket, told: Mapping[str, Any]) -> None:
    line.sendall(json.dumps(told).encode() + b"\n")


def _folder(server: Party) -> Path:
    return server.running / "door"


@contextlib.contextmanager
def short(folder: Path) -> Iterator[Path]:
    """Give a short path to a folder: that of a socket has a hundred characters at most."""
    if os.path.isdir("/proc/self/fd"):  # Linux: needs room nowhere
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield Path(f"/proc/self/fd/{number}")
        finally:
            os.close(number)
        return
    with tempfile.TemporaryDirectory(prefix="trilemma-", ignore_cleanup_errors=True) as temporary:
        link = Path(temporary) / "d"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield link
        link.unlink()


def follow(
    server: Party, run: str, replace: bool, say: Callable[[str], None], limit: float
) -> Iterator[dict[str, Any]]:
    """Begin a run, or go on with it, and return what the server tells until its end: records, and states.

    After `limit` seconds this ends, the run does not. Whoever attends the server starts again what ended, and
    the run goes on. Meanwhile nobody answers: that is said, and after a while it is taken for the end.

    Raises:
        ServerAwayError: nobody is there, or nobody came back.
        UserError: the server refuses.
    """
    deadline, shown, away = time.monotonic() + limit, -1, 0.0
    while True:
        try:
            left = None if math.isinf(limit) else max(0.0, deadline - time.monotonic())
            for told in ask(server, left, ask="run", run=run, replace=replace, shown=shown):
                if away:
                    say("the server is back")
                away, replace, shown = 0.0, False, told.get("shown", shown)
                yield told
                if time.monotonic() > deadline:
                    return
            return
        except TimeoutError:
            return
        except ServerAwayError as error:
            if shown < 0 or (away and time.monotonic() - away > AWAY):
                raise
            if not away:
                away = time.monotonic()
                say(f"{error}; run {run!r} is watched on")
            time.sleep(LOOK)
