"""Every vector that a server admitted, one file each: what a run follows from, for who wants to check it.

Kept where the federation agreed to that (`transcript` in federation.toml); `replay` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trilemma.base import files
from trilemma.base.errors import UserError
from trilemma.federation.protocol import kinds, wire
from trilemma.federation.protocol.admission import Admitted
from trilemma.federation.server.hearing import Heard


@dataclass(frozen=True)
class Transcript:
    """The transcript of a run, in its own folder below the run's."""

    run_folder: Path

    @property
    def folder(self) -> Path:
        """Where the vectors are."""
        return self.run_folder / "transcript"

    def keep(self, run: str, epoch: int, round_: int, heard: Heard) -> None:
        """Keep what clients were heard with in a round: their answers and, where they were asked, details."""
        self._write(run, epoch, round_, heard.answers, detail=False)
        if heard.details is not None:
            self._write(run, epoch, round_, heard.details, detail=True)

    def _write(self, run: str, epoch: int, round_: int, admitted: Admitted, *, detail: bool) -> None:
        for client, vector in admitted.vectors.items():
            header = kinds.Answer(client=client, run=run, epoch=epoch, round=round_)
            block = wire.dumps(header, {"vector": vector})
            files.write_atomically(self._path(round_, client, detail), block)

    def read(
        self, round_: int, epoch: int | None, clients: Iterable[int], dim: int, *, detail: bool = False
    ) -> Mapping[int, Tensor]:
        """Return what there is of these clients in a round's exchange: vectors of `dim` numbers."""
        found = {}
        for client in clients:
            path = self._path(round_, client, detail)
            if path.is_file():
                header, tensors = wire.read_file(path, kinds.Answer)
                vector = tensors.get("vector")
                if vector is None or (vector.shape, vector.dtype) != ((dim,), torch.float32):
                    raise UserError(f"{path} has no vector of {dim} numbers, float32")
                if header.epoch == epoch:  # or else of a try that a crash cut off
                    found[client] = vector
        return found

    def _path(self, round_: int, client: int, detail: bool) -> Path:
        return self.folder / f"{round_}-{client}{'-detail' if detail else ''}"
