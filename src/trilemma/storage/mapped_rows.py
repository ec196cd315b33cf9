"""Rows that lie in files of their own, as one tensor: seen one below the other, and not copied.

The system can show any part of a file, in whole pages, at any free address. So each row's file is shown where
the tensor has that row; rows are then a little further apart than they are long. A row that does not lie in a
file, or begins within a page, is copied to one. Where a system cannot do this all rows are copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma.storage import mapped

_MAP_FIXED = 0x10  # at this very address, in place of what is there
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # before Python 3.13 it has no name
_FAILED = ctypes.c_void_p(-1).value


def stacked(folder: Path, rows: Sequence[Tensor | None], numbers: int) -> Tensor:
    """Return float32 rows (n, numbers) one below the other; None is a row of NaN. It must not be written to.

    What has to be copied is in files of `folder` without a name.

    >>> folder = Path(tempfile.mkdtemp())
    >>> row = mapped.empty(folder, (3,), torch.float32).fill_(2.0)
    >>> stacked(folder, [row, None, torch.ones(3)], 3)
    tensor([[2., 2., 2.],
            [nan, nan, nan],
            [1., 1., 1.]])
    """
    if sys.platform == "linux" and rows and numbers:
        return _shown(folder, rows, numbers)
    whole = mapped.empty(folder, (len(rows), numbers), torch.float32)
    for there, row in zip(whole, rows, strict=True):
        _fill(there, row)
    return whole


def _fill(there: Tensor, row: Tensor | None) -> None:
    if row is None:
        there.fill_(torch.nan)
    else:
        there.copy_(row)


def _shown(folder: Path, rows: Sequence[Tensor | None], numbers: int) -> Tensor:
    """Return rows side by side in one range of addresses; those in files are mapped, others copied to one."""
    mapped.give_back_what_is_freed()
    length = 4 * numbers
    apart = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = mapped.Room(-1, apart * len(rows), flags=flags)  # addresses: nothing is ever written there
    whole = torch.from_numpy(np.frombuffer(room, np.float32)).as_strided(
        (len(rows), numbers), (apart // 4, 1)
    )
    regions, files = _regions(), list[Path | None]()
    with ExitStack() as stack:
        absent: int | None = None
        for there, row in zip(whole, rows, strict=True):
            place = None if row is None else _place_of(row, regions)
            files.append(place.path if place is not None and place.whole else None)
            if place is not None:
                with place.path.open("rb") as file:
                    _show(there, file.fileno(), place.offset, mmap.PROT_READ)
            elif row is None and absent is not None:
                _show(there, absent, 0, mmap.PROT_READ)
            else:
                handle = stack.enter_context(_new_file(folder, length))
                _show(there, handle, 0, mmap.PROT_READ | mmap.PROT_WRITE)
                _fill(there, row)
                absent = handle if row is None else absent
    room.folder, room.files = folder, tuple(files)
    mapped.ROOMS[whole.data_ptr()] = room
    return whole


def files_of(rows: Tensor) -> tuple[Path | None, ...]:
    """Return which file each row of `stacked` is all of; none for other tensors, and for parts of one."""
    room = mapped.ROOMS.get(rows.untyped_storage().data_ptr())
    whole = room is not None and rows.data_ptr() == rows.untyped_storage().data_ptr()
    if room is None or not whole or rows.dim() != 2 or len(rows) != len(room.files):
        return ()
    return room.files if 4 * rows.shape[1] > len(room) // len(rows) - mmap.PAGESIZE else ()


def chosen(rows: Tensor, places: Sequence[int]) -> Tensor:
    """Return some rows of a tensor: of one in files, where they lie.

    >>> chosen(torch.arange(6.0).view(3, 2), [2, 0])
    tensor([[4., 5.],
            [0., 1.]])
    """
    room = mapped.ROOMS.get(rows.untyped_storage().data_ptr())
    if room is None:
        return rows[list(places)]
    return stacked(room.folder, [rows[place] for place in places], rows.shape[1])


@dataclass(frozen=True)
class _Region:
    """Addresses at which the system shows a part of a file to everybody alike."""

    start: int
    end: int
    offset: int
    inode: int
    path: Path


@dataclass(frozen=True)
class _Place:
    path: Path
    offset: int
    whole: bool


def _regions() -> list[_Region]:
    """Return what the system shows in this process: `start-end rwxs offset device inode path`."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if " r--s " not in line and " rw-s " not in line:  # most are this process's own
            continue
        addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
        if path:
            start, end = (int(one, 16) for one in addresses.split("-"))
            found.append(_Region(start, end, int(offset, 16), int(inode), Path(path[0])))
    return found


def _place_of(row: Tensor, regions: Sequence[_Region]) -> _Place | None:
    """Return the file a row lies in and where, if that is the beginning of a page of a file with a name."""
    if row.dtype != torch.float32 or not row.is_contiguous():
        return None
    first, last = row.data_ptr(), row.data_ptr() + row.nbytes
    for one in regions:
        if one.start <= first and last <= one.end:
            offset = one.offset + first - one.start
            named = one.path.is_file() and one.path.stat().st_ino == one.inode
            if not named or offset % mmap.PAGESIZE:
                return None
            return _Place(one.path, offset, one.path.stat().st_size == row.nbytes)
    return None


@contextmanager
def _new_file(folder: Path, length: int) -> Iterator[int]:
    """Give a new file of this length that has no name."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(prefix=".mapped-", dir=folder) as file:
        mapped.take_room(file.fileno(), length)
        yield file.fileno()


def _show(there: Tensor, handle: int, offset: int, access: int) -> None:
    """Show an open file, from `offset` on, where a row of addresses is."""
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _mmap()(there.data_ptr(), there.nbytes, access, flags, handle, offset) == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@cache
def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    ]
    return function
