"""What a pass through a module found: the terms of every parameter's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from trilemma.models.engines.clipping import Lengths
from trilemma.models.engines.terms import Term, Whole, lengths_of, together
from trilemma.models.modules.recorder import Part
from trilemma.models.types import Buffers

Rows = tuple[int, int] | None


@dataclass(frozen=True)
class ModulePass:
    """See `trilemma.models.engines.engine.Pass`.

    `terms` holds, for every parameter, the terms of the whole of it (rows None) or of disjoint rows.
    """

    loss: Tensor
    terms: Mapping[str, Mapping[Rows, list[Term]]]
    params: Mapping[str, Tensor]
    shape: tuple[int, int]
    updated: Buffers = field(default_factory=dict)
    empty: Tensor | None = None
    """Which clients have no example at all, (k,): their gradient is zero."""

    def lengths(self) -> Lengths:
        """See `Pass`."""
        each = [lengths_of(terms) for parts in self.terms.values() for terms in parts.values()]
        return Lengths.together(each or [Lengths.exactly(self.loss.new_zeros(self.shape).double())])

    def write(self, out: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """See `Pass`."""
        for name, target in out.items():
            parts = self.terms.get(name, {})
            if None not in parts:
                target.zero_()
            for rows, terms in parts.items():
                block = target if rows is None else target[:, rows[0] : rows[1]]
                for number, term in enumerate(terms):
                    value = term.summed(factor).view(block.shape)
                    if number or rows is not None:
                        block += value
                    else:
                        block.copy_(value)
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
    if None in blocks:
        return False
    rows = sorted(block for block in blocks if block is not None)
    return all(one[1] <= other[0] for one, other in pairwise(rows))


def _padded(value: Tensor, rows: Rows, shape: torch.Size) -> Tensor:
    whole = value.new_zeros(*value.shape[:2], *shape)
    if rows is None:
        return value.view(whole.shape)
    whole[:, :, rows[0] : rows[1]] = value
    return whole
