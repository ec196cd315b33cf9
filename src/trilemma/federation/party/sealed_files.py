"""What a client must find on its disk as it left it: blocks behind a checksum, for its owner's eyes only.

A file that is not as it was written is put aside under another name, loudly, and counts as lost. What a
client does without its journal or its pair keys is decided where they are needed: never is anything repeated
that it cannot be sure of.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

from torch import Tensor

from trilemma.base import files
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.wire import AnyHeader

LONG = 1 << 24
"""Bytes from which on a file's tensors are seen where they lie."""


def write(path: Path, header: kinds.Header, tensors: wire.Tensors | None = None) -> None:
    """Replace a file by a block with its checksum; on disk when this returns."""
    files.write_atomically(path, *wire.sealed_parts(wire.parts_of(header, tensors)), secret=True)


def read(path: Path, expected: type[AnyHeader]) -> tuple[AnyHeader, dict[str, Tensor]] | None:
    """Return what `write` wrote; None where the file is broken, which is then put aside."""
    try:
        return wire.loads(wire.unsealed(_content(path)), expected)
    except (OSError, wire.WireError) as error:
        if isinstance(error, OSError) and not files.disk_broke(error):
            raise
        aside = path.with_name(f"{path.name}.broken")
        path.replace(aside)
        print(f"{path}: {error}; it was moved to {aside.name}", file=sys.stderr, flush=True)
        return None


def written(path: Path, expected: type[AnyHeader]) -> tuple[AnyHeader, dict[str, Tensor]]:
    """Return what this process has just written, and need not compare."""
    return wire.loads(wire.unchecked(_content(path)), expected)


def is_long(path: Path) -> bool:
    """Tell whether a file's tensors are seen where they lie, and not read into memory."""
    return path.stat().st_size > LONG


def _content(path: Path) -> wire.Block:
    """Return what is in a file; a long one is seen, in a copy of its own for who writes to it."""
    if not is_long(path):
        return path.read_bytes()
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
