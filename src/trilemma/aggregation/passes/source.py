"""Where messages are: in memory, in a stream of column chunks, or in shards (`aggregation.distributed`).

A rule asks a source twice, for the geometry and for the outcome of its decision; each is one pass over X.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from trilemma.aggregation.passes import inputs
from trilemma.aggregation.passes.gram import Geometry, finite_rows, measure
from trilemma.aggregation.steps.decision import Decision, Weighted
from trilemma.aggregation.steps.types import Aggregate, Vectors
from trilemma.base.errors import UserError


class Source(Protocol):
    """Messages that can be passed over."""

    @property
    def n(self) -> int:
        """Number of messages."""

    def geometry(self) -> Geometry:
        """Return the geometry of all columns: the first pass."""

    def finite(self) -> Any:
        """Return which messages are finite (n,), bool."""

    def carry_out(self, decision: Decision) -> Aggregate[Any]:
        """Return the outcome on all columns: the second pass."""


class Stream:
    """Chunks of columns, one at a time; only one chunk and the value are ever held."""

    def __init__(self, chunks: Iterable[Vectors] | Callable[[], Iterable[Vectors]]) -> None:
        if isinstance(chunks, Iterator):
            raise UserError(
                "a stream is read twice, and an iterator only runs once: pass a list, or a function that "
                "returns a new iterator"
            )
        self.chunks = chunks
        self.n = len(next(iter(self._messages())).X)

    def _messages(self) -> Iterator[inputs.RuleInputs]:
        n, seen = None, False
        for chunk in self.chunks() if callable(self.chunks) else self.chunks:
            given = inputs.messages(chunk)
            if n is not None and len(given.X) != n:
                raise UserError(
                    f"all chunks must have one row per client; got {n} and then {len(given.X)} rows"
                )
            n, seen = len(given.X), True
            yield given
        if not seen:
            raise UserError("an empty stream: a rule needs at least one chunk of columns")

    def geometry(self) -> Geometry:
        """Return the sum of the chunks' geometries."""
        parts = (measure(given.X) for given in self._messages())
        total = next(parts)
        for part in parts:
            total = total + part
        return total

    def finite(self) -> Any:
        """Return which messages are finite (n,), bool."""
        return np.all([finite_rows(given.X) for given in self._messages()], axis=0)

    def carry_out(self, decision: Decision) -> Aggregate[Any]:
        """Return the outcome, chunk by chunk."""
        values: list[torch.Tensor] = []
        shares, squares, given = np.zeros(()), np.zeros(()), None
        for given in self._messages():
            if isinstance(decision, Weighted):
                values.append(decision.apply(given.X))
            else:
                out = decision.apply(given.X)
                values.append(out.value)
                shares, squares = shares + out.shares, squares + out.squares
        assert given is not None
        value = values[0] if len(values) == 1 else torch.cat(values)
        if isinstance(decision, Weighted):
            return given.deliver(value, decision.weights, decision.scores, decision.info)
        weights, scores = decision.totals(shares, squares, len(value))
        return given.deliver(value, weights, scores, decision.info)


class InMemory(Stream):
    """All of X at once, one chunk; `known` is its geometry, where somebody measured it before."""

    def __init__(self, X: Vectors, known: Geometry | None = None) -> None:
        self.given, self.known = inputs.messages(X), known
        self.n = len(self.given.X)

    def _messages(self) -> Iterator[inputs.RuleInputs]:
        yield self.given

    def geometry(self) -> Geometry:
        """Return the geometry of X."""
        return super().geometry() if self.known is None else self.known
