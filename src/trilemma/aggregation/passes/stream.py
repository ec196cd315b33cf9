"""Messages larger than memory: two passes over chunks of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trilemma.aggregation.passes.source import Stream
from trilemma.aggregation.steps.rule import Rule, aggregate
from trilemma.aggregation.steps.types import Aggregate, Vectors
from trilemma.base.keys import Key


def stream(
    rule: Rule, chunks: Iterable[Vectors] | Callable[[], Iterable[Vectors]], key: Key | None = None
) -> Aggregate[Any]:
    """Apply a rule to messages that come in chunks of columns, each (n, some columns).

    The chunks are read twice: a list, or a function that returns a fresh iterator each time. Coordinate-wise
    rules without mixing read them once. Only one chunk and the value are held in memory.

    >>> import torch
    >>> from trilemma.aggregation import krum
    >>> X = torch.arange(20.0).reshape(5, 4)
    >>> stream(krum(f=1), [X[:, :3], X[:, 3:]]).value
    tensor([4., 5., 6., 7.])
    >>> stream(krum(f=1), lambda: (X[:, [j]] for j in range(4))).value
    tensor([4., 5., 6., 7.])
    """
    return aggregate(rule, Stream(chunks), key)
