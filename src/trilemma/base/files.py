"""Files that must survive a crash: written whole, on disk when the call returns, by one process at a time.

A folder can be synced on POSIX only; on Windows a renamed file is as durable as the system makes it.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import pickle
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from trilemma.base.errors import UserError

Content = bytes | memoryview | mmap.mmap

OWNER_ONLY = 0o600
BINARY = getattr(os, "O_BINARY", 0)
"""On Windows a descriptor translates line ends unless told not to."""

UNREADABLE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError),
    pickle.UnpicklingError,
)
"""What readers of JSON, of arrays and of checkpoints raise at a file that is not what it should be."""

PATIENCE = 2.0
"""Seconds until a held lock is refused: a killed process keeps its locks until its last thread has ended,
a moment after it counts as dead, and whoever starts its work again at once must not be sent away."""

DISK_ERRORS = frozenset(
    getattr(errno, name) for name in ("EIO", "EUCLEAN", "EBADMSG", "EREMOTEIO") if hasattr(errno, name)
)
"""What a system says of a file whose place on the disk is bad."""


def write_atomically(path: Path, *content: Content, secret: bool = False) -> None:
    """Replace a file's content so that a crash at any moment leaves the old or the new one, whole.

    The content may come in several parts, which are then never together in memory.

    A `secret` is never readable by anybody but its owner, not even while it is written.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "new folder" / "file"
    >>> write_atomically(path, b"one"); write_atomically(path, b"two"); path.read_bytes()
    b'two'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = half_written(path)
    temporary.unlink(missing_ok=True)  # a crash may have left one, with another mode
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY
    with told_of(path, temporary):
        with os.fdopen(os.open(temporary, flags, OWNER_ONLY if secret else 0o666), "wb") as file:
            for part in content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


def half_written(path: Path) -> Path:
    """Return where a file is until all of it is written."""
    return path.with_name(path.name + ".tmp")


@contextmanager
def told_of(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let an error of the system name the file, which it does not where a disk is full; drop what is half.

    Where torch could not write, it raises an error of its own over the system's.

    >>> with told_of(Path("here")):
    ...     raise OSError(errno.ENOSPC, "No space left")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left: 'here'
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        said = error if isinstance(error, OSError) else error.__context__
        if not isinstance(said, OSError):
            raise
        if said.errno is not None:
            said.filename = said.filename or str(path)
        raise said from None


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a path to write a large file to; afterwards it replaces `path`, whole and on disk.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "file"
    >>> with replaced(path) as new:
    ...     _ = new.write_bytes(b"one")
    >>> path.read_bytes(), new.exists()
    (b'one', False)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = half_written(path)
    with told_of(path, temporary):
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


def write_where_asked(path: Path, content: bytes) -> None:
    """Write a file that a user named: what is a link stays one, a pipe or a device is written into.

    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "link").symlink_to(folder / "file")
    >>> write_where_asked(folder / "link", b"one")
    >>> (folder / "link").is_symlink(), (folder / "file").read_bytes()
    (True, b'one')
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with told_of(path), path.open("wb") as file:
            file.write(content)
        return
    write_atomically(room_for(path.resolve()), content)


def room_for(path: Path) -> Path:
    """Return a path that a file can be written to, its folder made; refuse any other.

    >>> room_for(Path(tempfile.mkdtemp()))
    Traceback (most recent call last):
    trilemma.base.errors.UserError: '...' is a folder; name a file
    """
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {str(path.parent)!r} ({error.strerror})") from None
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise UserError(f"no file can be made in {str(path.parent)!r} ({error.strerror})") from None


@contextmanager
def readable(path: Path, what: str = "a run") -> Iterator[None]:
    """Turn whatever is wrong with a file, or a folder of files, into one kind of error that says so.

    >>> import json
    >>> with readable(Path("runs/a")):
    ...     json.loads("{")
    Traceback (most recent call last):
    trilemma.base.errors.UserError: 'a' cannot be read as a run: JSONDecodeError: Expecting property name ...
    """
    try:
        yield
    except UserError:
        raise
    except UNREADABLE as error:
        first = (str(error).strip() or "it ends too soon").split("\n")[0]
        raise UserError(
            f"{path.name or str(path)!r} cannot be read as {what}: {type(error).__name__}: {first[:200]}"
        ) from None


class NamedByContent:
    """A new file of a folder that is called as its SHA-256, once it is complete and on disk.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with NamedByContent(folder) as file:
    ...     file.add(b"o"); file.add(b"ne")
    ...     path = file.finish()
    >>> path.name == hashlib.sha256(b"one").hexdigest(), path.read_bytes()
    (True, b'one')
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".incomplete-", dir=folder)
        self._file, self._temporary, self._checksum = os.fdopen(handle, "wb"), Path(name), hashlib.sha256()

    def __enter__(self) -> NamedByContent:
        """Begin."""
        return self

    def add(self, piece: Content) -> None:
        """Write the next piece."""
        self._checksum.update(piece)
        self._file.write(piece)

    def finish(self) -> Path:
        """Give the file its name; it is on disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        path = self._temporary.with_name(self._checksum.hexdigest())
        self._file.close()
        self._temporary.replace(path)
        sync_folder(path.parent)
        return path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete what was not finished."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def disk_broke(error: OSError) -> bool:
    """Tell whether a file cannot be read because the disk broke it, and not for want of a right or of memory.

    >>> disk_broke(OSError(errno.EIO, "Input/output error")), disk_broke(PermissionError(errno.EACCES, "no"))
    (True, False)
    """
    return error.errno in DISK_ERRORS


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Let nobody else change a file between reading and writing it; others wait.

    The lock is a file beside it, whose name begins with a dot.

    >>> path = Path(tempfile.mkdtemp()) / "list"
    >>> with changing(path):
    ...     write_atomically(path, b"one")
    >>> sorted(one.name for one in path.parent.iterdir())
    ['.list.lock', 'list']
    """
    lock = lock_of(path)
    lock.touch()  # where no file can be made, whoever waits for the lock waits for ever
    with locked(lock):
        yield


def lock_of(path: Path) -> Path:
    """Return the lock of a file that is to be changed; refuse a file, or a lock, that could not be written.

    >>> path = Path(tempfile.mkdtemp()) / "list"
    >>> (path.parent / ".list.lock").mkdir(); lock_of(path)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: the lock '....list.lock' must be a file that you may write (Is a
    directory)
    """
    lock = room_for(path).with_name(f".{path.name}.lock")
    try:
        if os.path.lexists(lock):
            os.close(os.open(lock, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)))
    except OSError as error:
        raise UserError(
            f"the lock {str(lock)!r} must be a file that you may write ({error.strerror})"
        ) from None
    return lock


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Delete the files of a folder but those of these names."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in names:
            path.unlink(missing_ok=True)


def append_durably(path: Path, content: bytes) -> None:
    """Add `content` to the end of a file; it is on disk when this returns.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log"
    >>> append_durably(path, b"a,"); append_durably(path, b"b,"); path.read_bytes()
    b'a,b,'
    """
    with told_of(path), path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make sure that what was written to a file is on disk."""
    with told_of(path), path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make sure that the names of new files are on disk too, not only what is in them."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ends(path: Path) -> bool:
    """Tell a file, a folder or nothing from a pipe or a device, which whoever reads it may wait for.

    >>> ends(Path("nowhere")), ends(Path("/dev/null"))
    (True, False)
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


@contextmanager
def locked(path: Path, refusal: Exception | None = None) -> Iterator[None]:
    """Hold the lock file `path`, which goes free when this process ends, however it ends.

    Where somebody else goes on holding it, `refusal` is raised after `PATIENCE`; without one this waits.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lock"
    >>> with locked(path), locked(path, ValueError("somebody works here")):
    ...     pass
    Traceback (most recent call last):
    ValueError: somebody works here
    """
    lock = FileLock(path, timeout=-1 if refusal is None else PATIENCE, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        assert refusal is not None
        raise refusal from None
    try:
        yield
    finally:
        lock.release()
