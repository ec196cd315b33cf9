"""Clients' state and messages on disk, if they do not fit into memory ([run] state = "disk").

A tensor on disk is a mapped file without a name (`trilemma.storage.mapped`), so it disappears with the
tensor, however the process ends. Checkpoints are separate files. Clients are stepped a few at a time ([run]
at_once), so that only their part, with all that a step needs, is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilemma.base.errors import ConfigError
from trilemma.learning import ClientStep, Messages
from trilemma.learning.messages import Parts, side_by_side
from trilemma.storage import mapped


@dataclass(frozen=True)
class StateStorage:
    """Allocates tensors for all clients: in memory (`folder` None), or mapped from files in `folder`."""

    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and os.name != "posix":
            raise ConfigError("[run] state = 'disk' maps files that have no name, which needs POSIX")

    @property
    def on_disk(self) -> bool:
        """Whether tensors are files."""
        return self.folder is not None

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialised tensor of this shape and of the type of `like`.

        >>> StateStorage().empty((3, 2), torch.ones(1)).shape
        torch.Size([3, 2])
        """
        if self.folder is None or not like.is_floating_point():
            return like.new_empty(tuple(shape))
        return mapped.empty(self.folder, shape, like.dtype)

    def those(self, messages: Messages, rows: Sequence[int]) -> Messages:
        """Return `messages.rows(rows)`; if tensors are on disk, the copy is on disk too."""
        if self.folder is None or not rows or side_by_side(rows) is not None:
            return messages.rows(rows)
        copies = ClientRows(self, len(rows))
        parts = {**messages.beside, _VECTORS: messages.vectors}
        for row in rows:
            copies.add({name: part[row : row + 1] for name, part in parts.items()}, 1)
        vectors = copies.kept.pop(_VECTORS)
        senders = tuple(messages.senders[row] for row in rows) if messages.senders else ()
        return replace(messages, vectors=vectors, beside=copies.kept, senders=senders)


class ClientRows:
    """Named tensors for all clients, filled with a few clients' rows at a time."""

    def __init__(self, storage: StateStorage, clients: int) -> None:
        self._storage, self._clients, self._filled = storage, clients, 0
        self.kept: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, Tensor], count: int) -> None:
        """Copy the rows of the next `count` clients; `parts` are not kept."""
        for name, part in parts.items():
            if name not in self.kept:
                self.kept[name] = self._storage.empty((self._clients, *part.shape[1:]), part)
            self.kept[name][self._filled : self._filled + count] = part
        self._filled += count


class Collector:
    """Joins the steps of several groups of clients into one, with state and messages on a storage."""

    def __init__(self, storage: StateStorage, clients: int) -> None:
        self._state, self._sent = ClientRows(storage, clients), ClientRows(storage, clients)
        self._steps: list[tuple[Parts, Mapping[str, Any]]] = []
        self._same = ""

    def add(self, step: ClientStep) -> None:
        """Add the step of the next group of clients."""
        vectors = step.messages.vectors
        # The momentum family sends a part of its state: it is stored once.
        self._same = next((name for name, part in step.state.items() if part is vectors), "")
        self._state.add(step.state, len(vectors))
        own = {} if self._same else {_VECTORS: vectors}
        self._sent.add({**step.messages.beside, **own}, len(vectors))
        self._steps.append((step.messages.question, step.report))

    def step(self) -> ClientStep:
        """Return the joined step."""
        state, beside = self._state.kept, dict(self._sent.kept)
        vectors = state[self._same] if self._same else beside.pop(_VECTORS)
        question, first = self._steps[0]
        report = {
            name: torch.cat([said[name] for _, said in self._steps]) if isinstance(value, Tensor) else value
            for name, value in first.items()
        }
        return ClientStep(Messages(vectors, beside, question), state, report)


_VECTORS = "what the rule aggregates"
