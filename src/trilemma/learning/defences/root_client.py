"""The server as one more client: the message that a client with the server's public examples would send.

The last result is kept: liars who try lies out run the server hundreds of times in a round, each time with
the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trilemma.base.errors import ConfigError
from trilemma.base.keys import Key
from trilemma.learning.defences.filter import FilteredRound
from trilemma.learning.protocol import Algorithm, State
from trilemma.learning.settings import Setup
from trilemma.models.types import Model


class RootClient:
    """Runs a client's step on the root set, without noise."""

    def __init__(self, label: str, algorithm: Algorithm, setup: Setup) -> None:
        if setup.root is None:
            raise ConfigError(
                f"[aggregation] {label} needs public examples at the server; allowed: [aggregation] root = "
                "100"
            )
        assert algorithm.trace is not None
        self.algorithm, self.trace, self.root = algorithm, algorithm.trace, setup.root
        self.last: tuple[FilteredRound, Mapping[str, Tensor], tuple[Tensor, State]] | None = None

    def begin(self, model: Model, key: Key) -> State:
        """Return a client's state before the first round."""
        return self.algorithm.init(model, self.root.ids, key).clients

    def message(self, heard: FilteredRound, kept: Mapping[str, Tensor]) -> tuple[Tensor, State]:
        """Return the server's own message of a round (d,), and its state as a client afterwards."""
        if self.last is not None and _same(heard, self.last[0]) and _equal(kept, self.last[1]):
            return self.last[2]
        state = {name: part.to(heard.x.device) for name, part in kept.items()}
        done = self.algorithm.client(heard.broadcast, state, self.root, heard.round, heard.key)
        own = self.trace.vectors(done.messages.vectors, heard.broadcast[self.trace.model])[0]
        self.last = replace(heard, x=heard.x[:0]), kept, (own, done.state)
        return self.last[2]


def _same(one: FilteredRound, other: FilteredRound) -> bool:
    """Tell whether a client would do the same in both: same round, key, device and broadcast."""
    alike = (one.round, one.key, one.x.device) == (other.round, other.key, other.x.device)
    return alike and _equal(one.broadcast, other.broadcast)


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
