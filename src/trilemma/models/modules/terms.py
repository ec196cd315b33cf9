"""What one use of a parameter contributes to its gradient, per example and per client, formed or not.

An example's gradient of a matrix W is a sum over positions p (tokens, pixels, time steps) of outer products
l_p ⊗ r_p: of the output's gradient and the input for a linear layer, of a unit vector and the output's
gradient for an embedding. Its squared norm needs no gradient to be formed:

    ‖Σ_p l_p ⊗ r_p‖² = Σ_{p,q} ⟨l_p, l_q⟩ ⟨r_p, r_q⟩

("ghost norms", Li et al. 2022); where forming is cheaper, it is formed. All tensors have the axes (k clients,
b examples, …), and everything is for the losses w_i ℓ_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

WORKSPACE = {"cpu": 16 << 20, "cuda": 512 << 20}
"""Bytes that norms may take for what they form, by kind of device."""


class Term(Protocol):
    """One use of a parameter."""

    def squares(self) -> Tensor:
        """Return every example's squared norm (k, b), as if this were the only use."""

    def formed(self) -> Tensor:
        """Return every example's gradient (k, b, *shape)."""

    def summed(self, factor: Tensor | None) -> Tensor:
        """Return every client's Σ_i s_i G_i (k, *shape); `factor` (k, b) holds the s_i, None: 1."""


@dataclass(frozen=True)
class Whole:
    """Gradients that came formed, (k, b, *shape)."""

    value: Tensor

    def squares(self) -> Tensor:
        """See `Term`."""
        return self.value.reshape(*self.value.shape[:2], -1).square().sum(-1)

    def formed(self) -> Tensor:
        """See `Term`."""
        return self.value

    def summed(self, factor: Tensor | None) -> Tensor:
        """See `Term`."""
        return total(self.value, factor)


@dataclass(frozen=True)
class Shift:
    """A bias: the sum of the output's gradient (k, b, positions, c) over positions."""

    grad: Tensor

    @cached_property
    def value(self) -> Tensor:
        """Formed."""
        return self.grad.sum(2)

    def squares(self) -> Tensor:
        """See `Term`."""
        return self.value.square().sum(-1)

    def formed(self) -> Tensor:
        """See `Term`."""
        return self.value

    def summed(self, factor: Tensor | None) -> Tensor:
        """See `Term`."""
        return self.grad.sum((1, 2)) if factor is None else total(self.value, factor)


@dataclass(frozen=True)
class Scale:
    """A gain: z = γ x̂, so G = Σ_p ∂ℓ/∂z_p x̂_p; `normalised` computes x̂ anew rather than keep it."""

    grad: Tensor
    normalised: Callable[[], Tensor]

    @cached_property
    def value(self) -> Tensor:
        """Formed."""
        return (self.grad * self.normalised()).sum(2)

    def squares(self) -> Tensor:
        """See `Term`."""
        return self.value.square().sum(-1)

    def formed(self) -> Tensor:
        """See `Term`."""
        return self.value

    def summed(self, factor: Tensor | None) -> Tensor:
        """See `Term`."""
        return total(self.value, factor)


@dataclass(frozen=True)
class Product:
    """Σ_p l_p ⊗ r_p with `left` (k, b, P, m) and `right` (k, b, P, n), for a matrix (m, n)."""

    left: Tensor
    right: Tensor
    cache: list[Tensor] = field(default_factory=list, repr=False)

    def squares(self) -> Tensor:
        """Take the cheaper of Gram matrices over positions and gradients formed."""
        positions, m, n = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        lead = self.left.shape[:2]
        if positions == 1:
            return self.left.square().sum((2, 3)) * self.right.square().sum((2, 3))
        if self.small:
            return self.formed().flatten(2).square().sum(-1)
        left, right = self.left.flatten(0, 1), self.right.flatten(0, 1)
        ghost = positions * (m + n) < m * n
        each = 4 * (2 * positions**2 if ghost else m * n)
        step = max(1, WORKSPACE["cuda" if left.is_cuda else "cpu"] // each)
        parts = []
        for one, other in zip(torch.split(left, step), torch.split(right, step), strict=True):
            if ghost:
                parts.append((torch.bmm(one, one.mT) * torch.bmm(other, other.mT)).sum((1, 2)))
            else:
                parts.append(torch.bmm(one.mT, other).square().sum((1, 2)))
        return torch.cat(parts).view(lead)

    @property
    def small(self) -> bool:
        """Whether formed gradients take little room beside the factors they come from."""
        positions, m, n = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        return 2 * m * n <= positions * (m + n)

    def formed(self) -> Tensor:
        """See `Term`; kept where it is small."""
        if self.cache:
            return self.cache[0]
        value = torch.bmm(self.left.flatten(0, 1).mT, self.right.flatten(0, 1))
        value = value.view(*self.left.shape[:2], *value.shape[1:])
        if self.small:
            self.cache.append(value)
        return value

    def summed(self, factor: Tensor | None) -> Tensor:
        """One product per client over all its examples' positions."""
        if self.cache:
            return total(self.cache[0], factor)
        left, right = self.left, self.right
        if factor is not None:
            scale = factor[..., None, None]
            left, right = (left * scale, right) if left.numel() <= right.numel() else (left, right * scale)
        return torch.bmm(left.flatten(1, 2).mT, right.flatten(1, 2))


@dataclass(frozen=True)
class Lookup:
    """An embedding: row ids_p of a table of `rows` rows gets r_p; ids (k, b, P), `right` (k, b, P, n)."""

    ids: Tensor
    right: Tensor
    rows: int

    def squares(self) -> Tensor:
        """Sum what falls on the same row before squaring."""
        positions, n = self.right.shape[2:]
        if positions <= n:
            return pair(self, self)
        clients, size = self.ids.shape[:2]
        example = torch.arange(clients * size, device=self.ids.device).view(clients, size, 1)
        touched, where = torch.unique(self.ids + example * self.rows, return_inverse=True)
        sums = self.right.new_zeros(len(touched), n)
        sums.index_put_((where.flatten(),), self.right.reshape(-1, n), accumulate=True)
        squares = self.right.new_zeros(clients * size)
        squares.index_put_((touched // self.rows,), sums.square().sum(-1), accumulate=True)
        return squares.view(clients, size)

    def formed(self) -> Tensor:
        """See `Term`."""
        return self._scatter(self.ids.flatten(0, 1), self.right.flatten(0, 1)).view(
            *self.ids.shape[:2], self.rows, -1
        )

    def summed(self, factor: Tensor | None) -> Tensor:
        """See `Term`."""
        right = self.right if factor is None else self.right * factor[..., None, None]
        return self._scatter(self.ids.flatten(1), right.flatten(1, 2))

    def _scatter(self, ids: Tensor, right: Tensor) -> Tensor:
        """Return (u, rows, n) for ids (u, P), right (u, P, n)."""
        units = len(ids)
        offset = torch.arange(units, device=ids.device)[:, None] * self.rows
        # The same kernel as an embedding's own gradient: deterministic on every device.
        table: Tensor = torch.ops.aten.embedding_dense_backward(
            right, ids + offset, units * self.rows, -1, False
        )
        return table.view(units, self.rows, -1)


def total(value: Tensor, factor: Tensor | None) -> Tensor:
    """Return Σ_i s_i G_i (k, …) of formed gradients (k, b, …)."""
    if factor is None:
        return value.sum(1)
    flat = torch.bmm(factor[:, None].to(value.dtype), value.reshape(*value.shape[:2], -1))
    return flat.view(len(value), *value.shape[2:])


def pair(one: Product | Lookup, other: Product | Lookup) -> Tensor:
    """Return ⟨G_i, H_i⟩ (k, b) of two uses of the same matrix."""
    rights = torch.matmul(one.right, other.right.mT)
    if isinstance(one, Product) and isinstance(other, Product):
        lefts = torch.matmul(one.left, other.left.mT)
    elif isinstance(one, Lookup) and isinstance(other, Lookup):
        lefts = (one.ids[..., :, None] == other.ids[..., None, :]).to(rights.dtype)
    elif isinstance(one, Product) and isinstance(other, Lookup):
        lefts = torch.gather(one.left, 3, other.ids[..., None, :].expand(*one.left.shape[:3], -1))
    else:
        return pair(other, one)
    return (lefts * rights).sum((2, 3))


def squares_of(terms: list[Term]) -> Tensor:
    """Return the squared norms (k, b) of one parameter's gradients, cross terms of its uses included."""
    products = [term for term in terms if isinstance(term, Product)]
    if len(products) > 1:
        merged = Product(
            torch.cat([term.left for term in products], 2), torch.cat([term.right for term in products], 2)
        )
        terms = [merged, *(term for term in terms if not isinstance(term, Product))]
    if len(terms) == 1:
        return terms[0].squares()
    tables = [term for term in terms if isinstance(term, Product | Lookup)]
    if len(tables) == len(terms):
        cross = [2.0 * pair(one, other) for i, one in enumerate(tables) for other in tables[:i]]
        return torch.stack([*(term.squares() for term in tables), *cross]).sum(0).clamp(min=0.0)
    return Whole(torch.stack([term.formed() for term in terms]).sum(0)).squares()
