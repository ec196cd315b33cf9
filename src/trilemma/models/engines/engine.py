"""What an engine is: it takes some clients' examples through a model, forward and backward.

There are two. The layer engine (`trilemma.models.engines.layered`) knows the layers of this library and is
fastest on them; the module engine (`trilemma.models.modules`) takes any `torch.nn.Module`. What they find,
weights, clipping and regularisers are the same for both (`trilemma.models.engines.stacked`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.models.engines.clipping import Lengths
from trilemma.models.engines.terms import Term, Whole, lengths_of, together

if TYPE_CHECKING:
    from trilemma.models.types import Buffers, Examples, Inputs, Model


@dataclass(frozen=True)
class PassRequest:
    """Some clients' examples, and what is wanted of them.

    `params` is (d,) or (k, d); `share` (k, b) is every example's weight w_i. `by_example` asks for the
    lengths of single examples' gradients. `keys`, one per client, feed what the model draws.
    """

    params: Tensor
    x: Inputs
    y: Tensor
    share: Tensor
    padded: bool
    by_example: bool = False
    buffers: Buffers = field(default_factory=dict)
    keys: Sequence[Key] | None = None
    dropout: bool = True
    """Whether the model drops what it would drop in training."""
    first: int = 0
    """Number of the first example within its client's batch."""


Rows = tuple[int, int] | None
"""Some rows of a parameter; None: all of it."""

Block = tuple[str, Rows]
"""A parameter, or rows of one."""

Part = tuple[Block, Term]


@dataclass(frozen=True)
class Pass:
    """What a pass over k clients' b examples found, all of it for the losses w_i ℓ_i.

    `terms` holds, for every parameter, the terms of the whole of it (rows None) or of disjoint rows.
    """

    loss: Tensor
    """Each client's Σ_i w_i ℓ_i, (k,)."""
    terms: Mapping[str, Mapping[Rows, Sequence[Term]]]
    shape: tuple[int, ...]
    """(k, b)"""
    updated: Buffers = field(default_factory=dict)
    """New running statistics."""
    empty: Tensor | None = None
    """Which clients have no example at all, (k,): their gradient is zero."""

    def lengths(self) -> Lengths:
        """Return how long every example's gradient is at most, (k, b)."""
        each = [lengths_of(terms) for parts in self.terms.values() for terms in parts.values()]
        return Lengths.together(each or [Lengths.exactly(self.loss.new_zeros(self.shape).double())])

    def write(self, out: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """Write each client's Σ_i s_i w_i ∇ℓ_i over the tensors in `out` (k, …); `factor` (k, b), None: 1.

        The sums are taken in the precision of `factor`.
        """
        for name, target in out.items():
            parts = self.terms.get(name, {})
            if None not in parts:
                target.zero_()
            for rows, terms in parts.items():
                block = target if rows is None else target[:, rows[0] : rows[1]]
                for number, term in enumerate(terms):
                    if number or rows is not None:
                        block += term.summed(factor).view(block.shape)
                    else:
                        term.write(block, factor)
            if self.empty is not None:
                target[self.empty] = 0.0


def collect(parts: Sequence[Part], shapes: Mapping[str, torch.Size]) -> dict[str, dict[Rows, list[Term]]]:
    """Sort terms by parameter and rows; where rows overlap, form what they stand for."""
    found: dict[str, dict[Rows, list[Term]]] = {}
    for (name, rows), term in parts:
        found.setdefault(name, {}).setdefault(rows, []).append(term)
    for name, blocks in found.items():
        if len(blocks) > 1 and not _disjoint(list(blocks)):
            whole = [
                Whole(_padded(term.formed(), rows, shapes[name]))
                for rows, terms in blocks.items()
                for term in terms
            ]
            found[name] = {None: list(whole)}
    return {
        name: {rows: together(terms) if len(terms) > 1 else terms for rows, terms in blocks.items()}
        for name, blocks in found.items()
    }


def _disjoint(blocks: list[Rows]) -> bool:
    rows = sorted(block for block in blocks if block is not None)
    return len(rows) == len(blocks) and all(one[1] <= other[0] for one, other in pairwise(rows))


def _padded(value: Tensor, rows: Rows, shape: torch.Size) -> Tensor:
    whole = value.new_zeros(*value.shape[:2], *shape)
    if rows is None:
        return value.view(whole.shape)
    whole[:, :, rows[0] : rows[1]] = value
    return whole


class Engine(Protocol):
    """How a model's gradients are computed."""

    def require(self, model: Model, batch: Examples, by_example: bool) -> None:
        """Refuse a model or a batch for which the gradients asked for would be wrong."""

    def groups(
        self, model: Model, batch: Examples, memory: int, personal: bool
    ) -> Iterator[tuple[slice, slice]]:
        """Cut the (client, example) plane into groups that go through together."""

    def footprint(self, model: Model, x: Inputs, lead: int) -> int:
        """Return the bytes one example needs; `x` has `lead` axes before those of an example."""

    def run(self, model: Model, request: PassRequest) -> Pass:
        """Take a group through a forward and a backward pass."""
