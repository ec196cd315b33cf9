"""What is written survives: whole or not at all, for its owner only, by one process at a time."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys

import pytest

from trilemma.base import files


@pytest.mark.parametrize("secret", [False, True])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, secret):
    path = tmp_path / "file"
    files.write_atomically(path, b"old", secret=secret)
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, b"new", secret=secret)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("write", [files.write_atomically, files.append_durably])
def test_a_full_disk_is_told_with_the_file_and_nothing_half_written_stays(tmp_path, monkeypatch, write):
    """A system names no file where a write fails: whoever reads the message has to know which it was."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left") as told:
        write(tmp_path / "file", b"new")
    assert told.value.filename == str(tmp_path / "file")
    assert not (tmp_path / "file.tmp").exists()


@pytest.mark.skipif(os.name != "posix", reason="modes are a matter of POSIX")
def test_a_secret_is_for_its_owner_whatever_was_there_before(tmp_path):
    """Also where the file, or what a crash left of one, could be read by everybody."""
    path = tmp_path / "key"
    for old in (path, tmp_path / "key.tmp"):
        old.write_bytes(b"old")
        old.chmod(0o644)
    files.write_atomically(path, b"secret", secret=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["key"]


def test_bytes_are_written_as_they_are(tmp_path):
    files.write_atomically(tmp_path / "file", memoryview(b"a\r\nb\n\x1a"))
    files.append_durably(tmp_path / "file", b"\nc")
    assert (tmp_path / "file").read_bytes() == b"a\r\nb\n\x1a\nc"


def test_a_lock_goes_free_with_the_process_that_held_it(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    holder = (
        "import time; from pathlib import Path; from trilemma.base import files\n"
        f"with files.locked(Path({str(path)!r})):\n  print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            monkeypatch.setattr(files, "PATIENCE", 0.0)
            with pytest.raises(RuntimeError, match="in use"), files.locked(path, RuntimeError("in use")):
                pass
        finally:
            process.kill()
    monkeypatch.setattr(files, "PATIENCE", 240.0)
    with files.locked(path, RuntimeError("in use")):
        pass


HOLDER = """
import sys, threading, time
from pathlib import Path
from trilemma.base import files

big = bytearray(400_000_000)
big[::4096] = bytes(len(big[::4096]))
for _ in range(8):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
with files.locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(os.name == "nt", reason="a process counts as dead there when all of it is")
@pytest.mark.usefixtures("locks_waited_for")
def test_the_lock_of_a_killed_process_goes_free_before_anybody_is_refused(tmp_path):
    """Its first thread may be over while others still are not, and its locks are theirs too."""
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
        with files.locked(path, RuntimeError("refused")):
            pass
