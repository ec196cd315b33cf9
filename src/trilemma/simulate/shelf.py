"""Clients' state and messages on disk, for more of them than fit into memory ([run] state = "disk").

A tensor on the shelf is a mapped file without a name (`trilemma.mapped`), so it goes away with the tensor,
however the process ends; checkpoints are files of their own. Clients are stepped some at a time ([run]
at_once), so that only their part is in memory with all that a step needs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trilemma import mapped
from trilemma.errors import ConfigError
from trilemma.learning import ClientStep, Messages
from trilemma.learning.messages import Parts, side_by_side


@dataclass(frozen=True)
class Shelf:
    """Where tensors for all clients are put: in memory, or mapped from files in `folder`."""

    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and os.name != "posix":
            raise ConfigError("[run] state = 'disk' maps files that have no name, which needs POSIX")

    @property
    def on_disk(self) -> bool:
        """Whether tensors are files."""
        return self.folder is not None

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return room for a tensor of this shape, of the type of `like`.

        >>> Shelf().empty((3, 2), torch.ones(1)).shape
        torch.Size([3, 2])
        """
        if self.folder is None or not like.is_floating_point():
            return like.new_empty(tuple(shape))
        return mapped.empty(self.folder, shape, like.dtype)

    def those(self, messages: Messages, rows: Sequence[int]) -> Messages:
        """Return the messages of some clients, `Messages.rows`; a copy of tensors on disk is on disk too."""
        if self.folder is None or not rows or side_by_side(rows) is not None:
            return messages.rows(rows)
        copies = Rows(self, len(rows))
        parts = {**messages.beside, _VECTORS: messages.vectors}
        for row in rows:
            copies.add({name: part[row : row + 1] for name, part in parts.items()}, 1)
        vectors = copies.kept.pop(_VECTORS)
        senders = tuple(messages.senders[row] for row in rows) if messages.senders else ()
        return replace(messages, vectors=vectors, beside=copies.kept, senders=senders)


class Rows:
    """Named tensors for all clients, filled with the rows of some after the others."""

    def __init__(self, shelf: Shelf, clients: int) -> None:
        self._shelf, self._clients, self._filled = shelf, clients, 0
        self.kept: dict[str, Tensor] = {}

    def add(self, parts: Mapping[str, Tensor], count: int) -> None:
        """Put the rows of the next `count` clients away; nothing of them is held any more."""
        for name, part in parts.items():
            if name not in self.kept:
                self.kept[name] = self._shelf.empty((self._clients, *part.shape[1:]), part)
            self.kept[name][self._filled : self._filled + count] = part
        self._filled += count


class Collector:
    """Puts what clients sent and keep on a shelf, the steps of some after those of the others."""

    def __init__(self, shelf: Shelf, clients: int) -> None:
        self._state, self._sent = Rows(shelf, clients), Rows(shelf, clients)
        self._steps: list[tuple[Parts, Mapping[str, Any]]] = []
        self._same = ""

    def add(self, step: ClientStep) -> None:
        """Put one step away."""
        vectors = step.messages.vectors
        # What the momentum family sends is what it keeps: one place for both.
        self._same = next((name for name, part in step.state.items() if part is vectors), "")
        self._state.add(step.state, len(vectors))
        own = {} if self._same else {_VECTORS: vectors}
        self._sent.add({**step.messages.beside, **own}, len(vectors))
        self._steps.append((step.messages.question, step.report))

    def step(self) -> ClientStep:
        """Return all of them as one."""
        state, beside = self._state.kept, dict(self._sent.kept)
        vectors = state[self._same] if self._same else beside.pop(_VECTORS)
        question, first = self._steps[0]
        report = {
            name: torch.cat([said[name] for _, said in self._steps]) if isinstance(value, Tensor) else value
            for name, value in first.items()
        }
        return ClientStep(Messages(vectors, beside, question), state, report)


_VECTORS = "what the rule aggregates"
