"""What the server remembers of clients, where that is long: files that commits refer to.

A momentum method's server needs each client's last message to understand its next one, and one that keeps
evidence the sum of what each client sent: n × d numbers, which would be in memory, and in every commit. Here
each message, and all sums together, are a file under the checksum of its content, complete and on disk before
it has that name, and never changed afterwards. So a commit is still one file that is replaced whole. A round
writes new files for the sums and for those who were heard; a crash leaves, at worst, files that no commit
refers to, and they are deleted with those of commits that are not kept any more.
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
