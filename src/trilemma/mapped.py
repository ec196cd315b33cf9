"""Tensors that lie in files, for more numbers than memory should hold.

Such a tensor is a file mapped into memory. It is read and written like any other; the system brings its pages
in, and takes them out when memory is short. Who works on one looks at a few columns at a time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trilemma.errors import UserError


def empty(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor in a file of `folder` that has no name any more: it goes away with the tensor.

    Its room on the disk is taken at once. On a full disk that is an `OSError` here, where it can be told;
    later, when a page is written, the system would end the process without a word.

    >>> tensor = empty(Path(tempfile.mkdtemp()), (3, 2), torch.float32).fill_(2.0)
    >>> tensor.sum(), lies_in_a_file(tensor), lies_in_a_file(tensor.clone())
    (tensor(12.), True, False)
    """
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


def file_of(tensor: Tensor) -> Path | None:
    """Return the file that holds a tensor and nothing else, where there is one."""
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
    return Path(storage.filename) if whole and storage.filename is not None else None
