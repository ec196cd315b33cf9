"""What may be read to its end: a pipe, or a device, which somebody put in the place of a file, may not."""

from __future__ import annotations

import stat
from pathlib import Path


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
