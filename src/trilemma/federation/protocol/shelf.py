"""Where a round's messages lie when they are together longer than memory should hold: in files.

A message is read into its files a few columns at a time, where the algorithm's codec can. What must be
remembered of it lies in the server's memory (`memory`), everything else in files without a name, which are
gone with their tensors. Rules see such messages a few columns at a time (`learning.server`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trilemma.federation.protocol import wire
from trilemma.federation.protocol.memory import Memory
from trilemma.learning import MessageLayout, Messages
from trilemma.learning.messages import Asked, Parts
from trilemma.learning.protocol import State
from trilemma.storage import mapped

IN_MEMORY = 1 << 30
"""Bytes that the messages of a round may have together before they are put on a shelf."""


@dataclass(frozen=True)
class Shelf:
    """Keeps tensors in files of `folder`, and those that are remembered in `memory`."""

    folder: Path
    memory: Memory

    def needed(self, clients: int, dim: int) -> Shelf | None:
        """Return this shelf where messages of `clients` clients need one."""
        return self if 4 * clients * dim > IN_MEMORY else None

    def kept(self, state: State) -> dict[str, Tensor]:
        """Return a server's state; what is long of it, a row for each client, lies in the memory."""
        return {
            name: self.memory.keep_rows(tensor) if _long_rows(tensor) else tensor
            for name, tensor in state.items()
        }

    def read(
        self, layout: MessageLayout, sent: wire.Tensors, before: wire.Tensors | None, asked: Asked
    ) -> Messages:
        """Read one client's message, as `layout.decode` does, into files.

        Read in columns, it has no parts but those that are aggregated or remembered.
        """
        pieces = layout.decode_columns(sent, before, asked)
        if pieces is None:
            return self._put(layout, layout.decode(sent, before, asked))
        rest = set(layout.aggregated) - set(layout.remembered)
        rooms = {name: self._empty(layout.shape(name), torch.float32) for name in rest}
        kept = self.memory.keep(
            _filling(rooms, pieces), {name: layout.shape(name) for name in layout.remembered}
        )
        return layout.assembled({name: part[None] for name, part in {**rooms, **kept}.items()})

    def _put(self, layout: MessageLayout, message: Messages) -> Messages:
        """Move a message that was read as a whole to files."""
        whole = layout.to_remember(message)
        kept = {name: part for name, part in whole.items() if self.memory.reference(part) is not None}
        new = {name: part for name, part in whole.items() if name not in kept}
        kept |= self.memory.keep(iter([new]), {name: part.shape for name, part in new.items()})
        beside = {name: self._copy(part) for name, part in message.beside.items() if name not in kept}
        beside |= {name: kept[name][None] for name in kept if name not in layout.aggregated}
        same = kept.get(layout.aggregated[0]) if len(layout.aggregated) == 1 else None
        vectors = self._copy(message.vectors) if same is None else same.reshape(1, -1)
        return Messages(vectors, beside)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return mapped.empty(self.folder, shape, dtype)

    def _copy(self, tensor: Tensor) -> Tensor:
        return self._empty(tensor.shape, tensor.dtype).copy_(tensor)

    def stack(self, vectors: Mapping[int, Tensor], rows: Sequence[int], dim: int) -> Tensor:
        """Return one row per client of `rows`, NaN for those without a vector."""
        return mapped.stacked(self.folder, [vectors.get(client) for client in rows], dim)


def _long_rows(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype == torch.float32 and tensor.nbytes > IN_MEMORY


def _filling(rooms: Mapping[str, Tensor], pieces: Iterator[Parts]) -> Iterator[Parts]:
    """Pass pieces on, and put those of `rooms` into their places."""
    filled = 0
    for parts in pieces:
        columns = len(next(iter(parts.values())))
        for name, room in rooms.items():
            room[filled : filled + columns] = parts[name]
        filled += columns
        yield parts
