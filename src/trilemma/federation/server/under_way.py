"""Which run the server is in the middle of: whoever starts the server again can then continue it.

A server app writes the name down when it begins and forgets it when it is done, or has decided to stop. One
that was killed forgets nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.party.layout import RUN_NAME, Party


def run_under_way(server: Party) -> str | None:
    """Return the run that was begun and has not come to an end, whether or not anybody works on it now."""
    path = _file(server)
    name = path.read_text(errors="replace") if path.is_file() else ""
    return name if RUN_NAME.fullmatch(name) else None


@contextmanager
def under_way(server: Party, run: str, broken_off: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Remember a run while it lasts; what it ends with is its end, unless that is one of `broken_off`.

    >>> import tempfile
    >>> server = Party(Path(tempfile.mkdtemp()), None)
    >>> with under_way(server, "monday"):
    ...     run_under_way(server)
    'monday'
    >>> run_under_way(server)
    """
    files.write_atomically(_file(server), run.encode())
    try:
        yield
    except broken_off:
        raise
    except Exception:
        _file(server).unlink(missing_ok=True)
        raise
    _file(server).unlink(missing_ok=True)


@contextmanager
def alone(server: Party) -> Iterator[None]:
    """Keep every other run of this server's out: two would take each other's ledgers for ones set back.

    The lock is gone when the process is.

    >>> import tempfile
    >>> server = Party(Path(tempfile.mkdtemp()), None)
    >>> with alone(server), alone(server):
    ...     pass
    Traceback (most recent call last):
    trilemma.base.errors.UserError: another run of the federation in ... is under way: one at a time
    """
    lock = _file(server).with_name("under-way.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    refusal = UserError(f"another run of the federation in {server.folder} is under way: one at a time")
    with files.locked(lock, refusal):
        yield


def _file(server: Party) -> Path:
    return server.state / "under-way"
