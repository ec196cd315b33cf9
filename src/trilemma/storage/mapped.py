"""Tensors that lie in files, for more numbers than memory should hold.

Such a tensor is a file mapped into memory. It is read and written like any other; the system brings its pages
in, and takes them out when memory is short. Who works on one looks at a few columns at a time.

Memory beside the files must then be given back when it is free. The C library on Linux keeps what was freed
in pieces of up to 32 MB for later, in a heap full of holes, where small results lie between freed pieces: a
process that works on a few columns at a time soon has as much of it as if it had read everything. So the
first tensor in a file asks it not to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trilemma.base.errors import UserError

LARGE = 1 << 17
"""Bytes from which on what is freed goes back to the system at once; the C library itself begins with it."""

_M_MMAP_THRESHOLD = -3  # the C library's number for that setting


@cache
def give_back_what_is_freed() -> None:
    """Have the C library return large pieces of memory when they are freed, from now on, where it can."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another system, or another library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE)


def empty(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in a file of `folder` without a name: the file goes away with the tensor.

    Its room on the disk is taken at once. On a full disk that is an `OSError` here, where it can be told;
    later, when a page is written, the system would end the process without a word.

    >>> tensor = empty(Path(tempfile.mkdtemp()), (3, 2), torch.float32).fill_(2.0)
    >>> tensor.sum(), lies_in_a_file(tensor), lies_in_a_file(tensor.clone())
    (tensor(12.), True, False)
    """
    give_back_what_is_freed()
    folder.mkdir(parents=True, exist_ok=True)
    numbers = torch.Size(shape).numel()
    handle, name = tempfile.mkstemp(prefix=".mapped-", dir=folder)
    try:
        if numbers:
            take_room(handle, numbers * dtype.itemsize)
        return torch.from_file(name, shared=True, size=numbers, dtype=dtype).view(*shape)
    finally:
        os.close(handle)
        with contextlib.suppress(PermissionError):  # where a file in use cannot be deleted
            os.unlink(name)


def opened(path: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor that a file holds; refuse a file of another length. It must not be written to."""
    give_back_what_is_freed()
    numbers = torch.Size(shape).numel()
    size, expected = path.stat().st_size, numbers * dtype.itemsize
    if size != expected:
        raise UserError(f"{path.name} has {size} bytes where {expected} were written")
    return torch.from_file(str(path), shared=True, size=numbers, dtype=dtype).view(*shape)


def take_room(handle: int, size: int) -> None:
    """Make an open file `size` bytes long, with room on the disk for all of them."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.truncate(handle, size)


def lies_in_a_file(tensor: Tensor) -> bool:
    """Tell whether a tensor is, or is a part of, a mapped file."""
    return tensor.untyped_storage().filename is not None


def beside(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor of the same type as another: in a file beside its file, if that lies in one.

    >>> beside(torch.ones(2), (3, 2)).shape
    torch.Size([3, 2])
    """
    if not lies_in_a_file(tensor):
        return tensor.new_empty(tuple(shape))
    return empty(Path(str(tensor.untyped_storage().filename)).parent, shape, tensor.dtype)


def stacked(folder: Path, rows: Sequence[Tensor | None], numbers: int) -> Tensor:
    """Return float32 rows, wherever they lie, as a tensor (n, numbers) in a file; None is a row of NaN.

    >>> stacked(Path(tempfile.mkdtemp()), [None, torch.ones(2)], 2)
    tensor([[nan, nan],
            [1., 1.]])
    """
    whole = empty(folder, (len(rows), numbers), torch.float32)
    for there, row in zip(whole, rows, strict=True):
        there.copy_(torch.tensor(torch.nan) if row is None else row)
    return whole


def file_of(tensor: Tensor) -> Path | None:
    """Return the file that holds a tensor and nothing else, where there is one."""
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
    return Path(storage.filename) if whole and storage.filename is not None else None
