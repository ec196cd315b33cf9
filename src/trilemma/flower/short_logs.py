"""Logs that nobody else can make long: a process of a party puts its own aside when it is long enough.

What a SuperLink, a SuperNode, a guard or a worker prints goes to a file that is opened once, by who starts
it. Much of that is a line for every message, and messages come from others: a client could fill the server's
disk, and a server its clients'. Such a file is opened to be added to, so it can be emptied while it is used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
import time
from pathlib import Path

from trilemma.flower import BELL

LARGEST = 8 << 20
"""Bytes after which a log is put aside, as NAME.log.1, and a new one begun."""
LOOK = 5.0
"""Seconds between two looks."""


def keep_short(largest: int = LARGEST, look: float = LOOK) -> None:
    """Look after the log of this process of a party until it ends; it lies where the party's bell does."""
    bell = os.environ.get(BELL)
    if bell is None:
        return  # somebody started it by hand, and sees what it prints

    def watch() -> None:
        while True:
            time.sleep(look)
            with contextlib.suppress(OSError):
                put_aside(Path(bell).parent, largest)

    threading.Thread(target=watch, daemon=True, name="short-logs").start()


def put_aside(folder: Path, largest: int) -> bool:
    """Begin this process's log anew where it is longer than `largest`; what it said before is in NAME.log.1.

    Where that cannot be written, on a full disk, it is lost: room is worth more then.
    """
    printed = os.fstat(1)
    if not stat.S_ISREG(printed.st_mode) or printed.st_size <= largest:
        return False
    for log in folder.glob("*.log"):
        if os.path.samestat(log.stat(), printed):
            with contextlib.suppress(OSError):
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)
            return True
    return False
