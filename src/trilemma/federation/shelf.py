"""Where a round's messages lie when they are together longer than memory should hold: in files.

A tensor on a shelf is a mapped file. The system reads and writes its pages as they are used, and takes them
back when memory is short; the file has no name any more when it is handed out, and is gone with the tensor.
Rules see such messages a few columns at a time (`learning.server`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkstemp

import torch
from torch import Tensor

from trilemma.learning import Messages

IN_MEMORY = 1 << 30
"""Bytes that the messages of a round may have together before they are put on a shelf."""


@dataclass(frozen=True)
class Shelf:
    """Keeps tensors in files of `folder`."""

    folder: Path

    @classmethod
    def for_(cls, folder: Path, clients: int, dim: int) -> Shelf | None:
        """Return a shelf where messages of `clients` clients need one."""
        return cls(folder) if 4 * clients * dim > IN_MEMORY else None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that lies in a file.

        >>> import tempfile
        >>> tensor = Shelf(Path(tempfile.mkdtemp())).empty((2, 3), torch.float32)
        >>> tensor.shape, tensor.untyped_storage().filename is None
        (torch.Size([2, 3]), False)
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = mkstemp(dir=self.folder)
        with open(handle, "r+b"):
            size = int(torch.Size(shape).numel())
            tensor = torch.from_file(name, shared=True, size=size, dtype=dtype)
        with contextlib.suppress(OSError):  # where a file in use cannot be deleted it is overwritten later
            Path(name).unlink()
        return tensor.reshape(tuple(shape))

    def keep(self, message: Messages) -> Messages:
        """Return a message whose tensors lie here; what lies in a file already stays where it is."""
        beside = {name: self._kept(part) for name, part in message.beside.items()}
        return replace(message, vectors=self._kept(message.vectors), beside=beside)

    def _kept(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def stack(self, vectors: Mapping[int, Tensor], rows: Sequence[int], dim: int) -> Tensor:
        """Return one row per client of `rows`, NaN for those without a vector."""
        stacked = self.empty((len(rows), dim), torch.float32)
        for place, client in enumerate(rows):
            if client in vectors:
                stacked[place].copy_(vectors[client])
            else:
                stacked[place].fill_(torch.nan)
        return stacked
