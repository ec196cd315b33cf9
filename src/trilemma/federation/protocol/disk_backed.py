"""What is longer than memory should hold, in files: what the server remembers of clients, a round's messages.

A momentum method's server needs each client's last message to understand its next one, and one that keeps
evidence the sum of what each client sent: n × d numbers, which would be in memory, and in every commit. Here
each message, and all sums together, are a file under the checksum of its content, complete and on disk before
it has that name, and never changed afterwards. So a commit is still one file that is replaced whole. A round
writes new files for the sums and for those who were heard; a crash leaves, at worst, files that no commit
refers to, and they are deleted with those of commits that are not kept any more.

A message is read into files a few columns at a time, where the algorithm's codec can. What need not be
remembered of it lies in files without a name, which are gone with their tensors. Rules see such messages a
few columns at a time (`learning.server`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.protocol import wire
from trilemma.learning import MessageLayout, Messages
from trilemma.learning.messages import Asked, Parts
from trilemma.learning.protocol import State
from trilemma.storage import mapped

IN_MEMORY = 1 << 30
"""Bytes that the messages of a round may have together before they lie in files."""

TOGETHER = 1 << 22
"""Numbers of a row that are written together."""


class FileReference(BaseModel):
    """A tensor in a file, as a commit names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    file: str = Field(pattern="^[0-9a-f]{64}$")
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class Memory:
    """The files in `folder`."""

    folder: Path

    def reference(self, tensor: Tensor) -> FileReference | None:
        """Return how a commit refers to a tensor; None where that does not lie here."""
        path = mapped.file_of(tensor)
        if path is None or path.parent != self.folder:
            return None
        dtype = str(tensor.dtype).removeprefix("torch.")
        return FileReference(file=path.name, dtype=dtype, shape=list(tensor.shape))

    def keep_rows(self, rows: Tensor) -> Tensor:
        """Write rows (n, d) to one file, if they do not lie here; return them where they lie then."""
        if self.reference(rows) is not None:
            return rows
        pieces = ({"rows": some} for row in rows for some in torch.split(row, TOGETHER))
        return self.keep(pieces, {"rows": rows.shape})["rows"]

    def tensor(self, reference: FileReference) -> Tensor:
        """Return a tensor that a commit refers to, where it lies; refuse a file that is not as long."""
        try:
            path, dtype = self.folder / reference.file, wire.DTYPES[reference.dtype]
            return mapped.opened(path, wire.shape_of(reference.shape), dtype)
        except (OSError, LookupError, UserError) as error:
            raise wire.WireError(f"what was remembered is not to be had: {error}") from None

    def check(self, references: Collection[FileReference]) -> None:
        """Refuse files whose content is not what their names say: the disk changed it."""
        for name in sorted({one.file for one in references}):
            try:
                with (self.folder / name).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:  # a disk that cannot be read
                found = str(error.strerror)
            if found != name:
                raise wire.WireError(f"what was remembered is not as it was written: {found}, not {name}")

    def keep(
        self, pieces: Iterator[Mapping[str, Tensor]], shapes: Mapping[str, Sequence[int]]
    ) -> wire.Tensors:
        """Write named tensors that come in pieces of columns; on disk when this returns."""
        with ExitStack() as stack:
            new = {name: stack.enter_context(files.NamedByContent(self.folder)) for name in shapes}
            dtypes = {}
            for parts in pieces:
                for name, file in new.items():
                    dtypes[name] = parts[name].dtype
                    file.add(wire.raw(parts[name]))
            paths = {name: file.finish() for name, file in new.items()}
        return {name: mapped.opened(path, shapes[name], dtypes[name]) for name, path in paths.items()}

    def forget_all_but(self, references: Collection[FileReference]) -> None:
        """Delete the files that none of these refers to, and what a crash left half written."""
        files.keep_only(self.folder, {one.file for one in references})


@dataclass(frozen=True)
class DiskBacked:
    """Keeps tensors in files of `folder`, and those that are remembered in `memory`."""

    folder: Path
    memory: Memory

    def needed(self, clients: int, dim: int) -> DiskBacked | None:
        """Return this where messages of `clients` clients need it."""
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
