"""What the server remembers of clients, where that is long: files that commits refer to.

A momentum method's server needs each client's last message to understand its next one, and one that keeps
evidence the sum of what each client sent: n × d numbers, which would be in memory, and in every commit. Here
each client's are a file under the checksum of its content, complete and
on disk before it has that name, and never changed afterwards. So a commit is still one file that is replaced
whole. A round writes new files for those who were heard and none for the others; a crash leaves, at worst,
files that no commit refers to, and they are deleted with those of commits that are not kept any more.
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
from trilemma.storage import mapped
from trilemma.storage.mapped_rows import files_of, stacked

TOGETHER = 1 << 22
"""Numbers of a row that are written, or compared, together."""


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

    def references(self, rows: Tensor) -> list[FileReference]:
        """Return how a commit refers to rows (n, d) that lie here, each a file; nothing where they do not."""
        if rows.dim() != 2:
            return []
        paths = [path for path in files_of(rows) if path is not None and path.parent == self.folder]
        if len(paths) != len(rows):
            return []
        return [FileReference(file=path.name, dtype="float32", shape=[rows.shape[1]]) for path in paths]

    def rows(self, references: Sequence[FileReference]) -> Tensor:
        """Return rows that a commit refers to, where they lie."""
        found = [self.tensor(one) for one in references]
        if len({(one.dtype, one.shape) for one in found}) != 1 or found[0].dim() != 1:
            raise wire.WireError("rows that were remembered are not alike")
        return stacked(self.folder, found, len(found[0]))

    def keep_rows(self, rows: Tensor, before: Tensor | None = None) -> Tensor:
        """Write rows (n, d), float32, that are others than `before`; return all where they lie then."""
        known = () if before is None or before.shape[1:] != rows.shape[1:] else files_of(before)
        kept: list[Path] = []
        for place, row in enumerate(rows):
            path = known[place] if place < len(known) else None
            if (
                place and row.data_ptr() == rows[place - 1].data_ptr()
            ):  # one row for all, before the first round
                kept.append(kept[-1])
            elif before is None or path is None or not _same(row, before[place]):
                kept.append(self._keep_row(row))
            else:
                kept.append(path)
        shape = rows.shape[1:]
        return stacked(self.folder, [mapped.opened(path, shape, rows.dtype) for path in kept], rows.shape[1])

    def _keep_row(self, row: Tensor) -> Path:
        with files.NamedByContent(self.folder) as file:
            for some in torch.split(row, TOGETHER):
                file.add(wire.raw(some))
            return file.finish()

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


def _same(row: Tensor, other: Tensor) -> bool:
    """Tell whether two rows are the same to the bit."""
    pairs = zip(torch.split(row, TOGETHER), torch.split(other, TOGETHER), strict=True)
    return all(torch.equal(one.view(torch.int32), two.view(torch.int32)) for one, two in pairs)
