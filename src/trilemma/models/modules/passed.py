"""What a pass through a module found: the terms of every parameter's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from trilemma.models.modules.recorder import Part
from trilemma.models.modules.terms import Lookup, Product, Term, Whole, squares_of
from trilemma.models.types import Buffers

Rows = tuple[int, int] | None


@dataclass(frozen=True)
class ModulePass:
    """See `trilemma.models.engine.Pass`.

    `terms` holds, for every parameter, the terms of the whole of it (rows None) or of disjoint rows.
    """

    loss: Tensor
    terms: Mapping[str, Mapping[Rows, list[Term]]]
    params: Mapping[str, Tensor]
    shape: tuple[int, int]
    updated: Buffers = field(default_factory=dict)
    empty: Tensor | None = None
    """Which clients have no example at all, (k,): their gradient is zero."""

    def squared_norms(self) -> Tensor:
        """See `Pass`."""
        blocks = [terms for parts in self.terms.values() for terms in parts.values()]
        squares = [squares_of(terms) for terms in blocks]
        return torch.stack(squares).sum(0) if squares else self.loss.new_zeros(self.shape)

    def inner_products(self) -> Tensor:
        """See `Pass`."""
        products = self.loss.new_zeros(self.shape)
        for name, parts in self.terms.items():
            # Parameters get the axes (k or 1, 1, …).
            theta = self.params[name]
            for rows, terms in parts.items():
                block = theta if rows is None else theta[:, rows[0] : rows[1]]
                products = products + torch.stack([_inner(term, block) for term in terms]).sum(0)
        return products

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
    return found


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


def _inner(term: Term, theta: Tensor) -> Tensor:
    """Return ⟨G_i, θ⟩ (k, b) for θ (k or 1, *shape)."""
    if isinstance(term, Product):
        return (torch.matmul(term.right, theta[:, None].mT) * term.left).sum((2, 3))
    if isinstance(term, Lookup):
        client = torch.arange(len(theta), device=theta.device)[:, None, None]
        return (theta[client, term.ids] * term.right).sum((2, 3))
    products = term.formed() * theta[:, None]
    return products.reshape(*products.shape[:2], -1).sum(2)
