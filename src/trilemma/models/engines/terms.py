"""What one use of a parameter contributes to its gradient, per example and per client, formed or not.

An example's gradient of a matrix W is a sum over positions p (tokens, pixels, time steps) of outer products
l_p ⊗ r_p: of the output's gradient and the input for a linear layer, of a unit vector and the output's
gradient for an embedding. Its squared norm needs no gradient to be formed:

    ‖Σ_p l_p ⊗ r_p‖² = Σ_{p,q} ⟨l_p, l_q⟩ ⟨r_p, r_q⟩

("ghost norms", Li et al. 2022); where forming is cheaper, it is formed. Terms of both signs may cancel, so
what is computed (N̂, Ĝ) is not what it stands for. With S = Σ_p ‖l_p‖ ‖r_p‖, l ∈ R^m, r ∈ R^n, and inner
products of unit roundoff u,

    |N̂² − ‖G‖²| ≤ γ_{m+n+3} S² + τ,     ‖Ĝ − G‖ ≤ γ_P S + τ

where the outer sum is in double precision and the τ cover underflow and flushing to zero; m and n count no
further than 1024, since inner products of longer rows are added up from parts in double precision. Every term
says by these what its gradient's length is at most (`Lengths`). A gradient that is kept formed, and summed as
it is, has its own length. Where products in single precision round their factors (TF32), a norm they find is
another one's than that of what a careful sum multiplies: by at most 2⁻⁹ S.

All tensors have the axes (k clients, b examples, …), and everything is for the losses w_i ℓ_i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.models.engines.clipping import DOUBLE, Lengths, gamma, lengths_of_rows

WORKSPACE = {"cpu": 16 << 20, "cuda": 512 << 20}
"""Bytes that norms may take for what they form, by kind of device."""

WIDTH = 1024
"""How many numbers of an inner product are added up in single precision."""

TABLE = 192
"""How many numbers a gradient has that is formed and kept, whatever its factors take."""

TINY = 2.0**-126
"""What a single-precision product may lose by underflow, or a number by being flushed to zero."""

SHORT = 2.0**-9
"""What rounding both factors to TF32 may take from a product, or add to it."""


def unit_of(like: Tensor) -> float:
    """Return the unit roundoff of sums of products of tensors like this one.

    On tensor cores products are exact. Eight of them and the sum so far are brought to the exponent of the
    largest and are cut instead of rounded: 9/8 · 2⁻²³ a term, taken as 5/4 · 2⁻²³.
    """
    if like.dtype == torch.float64:
        return DOUBLE
    return 1.25 * 2.0**-23 if shortens() else 2.0**-24


def shortens() -> bool:
    """Whether products may round their single-precision factors to TF32; refuses bfloat16."""
    precision = torch.get_float32_matmul_precision()
    if precision == "medium":
        raise UserError(
            'torch.set_float32_matmul_precision("medium") rounds factors to bfloat16, which no bound on the '
            'length of an example\'s gradient counts with: use "highest" or "high"'
        )
    return precision == "high"


def gram(rows: Tensor) -> Tensor:
    """Return ⟨x_p, x_q⟩ (u, P, P) of (u, P, m); long rows in parts that are added up in double precision."""
    if rows.shape[2] <= WIDTH:
        return torch.bmm(rows, rows.mT)
    total = rows.new_zeros(*rows.shape[:2], rows.shape[1], dtype=torch.float64)
    for part in torch.split(rows, WIDTH, dim=2):
        total += torch.bmm(part, part.mT)
    return total


def _rows(factor: Tensor) -> Tensor:
    """Return the rows (k, b · P, n) of a factor (k, b, P, n)."""
    return factor.squeeze(2) if factor.shape[2] == 1 else factor.flatten(1, 2)


@lru_cache(maxsize=1024)
def _margins(positions: int, m: int, n: int, unit: float, short: bool) -> tuple[float, float]:
    """Return what squares on the diagonal are multiplied by, and the share of S² that is added."""
    above = (1 + SHORT * short) ** 2 * (1 + gamma(max(m, n) + 4, unit))
    return above, gamma(min(m, WIDTH) + min(n, WIDTH) + 3, unit) + gamma(positions**2 + m + n, DOUBLE)


class Term:
    """One use of a parameter."""

    @property
    def floats(self) -> int:
        """How many numbers are kept to clip examples, besides what it is made from."""
        return 0

    def lengths(self) -> Lengths:
        """Return how long every example's gradient is at most, as if this were the only use."""
        raise NotImplementedError

    def formed(self) -> Tensor:
        """Return every example's gradient (k, b, *shape)."""
        raise NotImplementedError

    def error(self) -> Tensor | float:
        """Return by how much what is `formed` may differ from what is summed, (k, b)."""
        return 0.0

    def summed(self, factor: Tensor | None) -> Tensor:
        """Return every client's Σ_i s_i G_i (k, *shape); `factor` (k, b) holds the s_i, None: 1.

        The sum is taken in the precision of `factor`.
        """
        raise NotImplementedError

    def write(self, out: Tensor, factor: Tensor | None) -> None:
        """Write what is `summed` over `out` (k, *shape)."""
        out.copy_(self.summed(factor).view(out.shape))


@dataclass(frozen=True)
class PerClient(Term):
    """A gradient of each client (k, *shape), where no example has one of its own."""

    value: Tensor

    def summed(self, factor: Tensor | None) -> Tensor:
        """See `Term`."""
        return self.value


class Formed(Term):
    """A term whose gradients are formed, in `value` (k, b, *shape), and summed as they are."""

    value: Tensor

    def lengths(self) -> Lengths:
        """See `Term`."""
        return Lengths.formed(self.value)

    def formed(self) -> Tensor:
        """See `Term`."""
        return self.value

    def summed(self, factor: Tensor | None) -> Tensor:
        """See `Term`."""
        return total(self.value, factor)


@dataclass(frozen=True)
class Whole(Formed):
    """Gradients that came formed, (k, b, *shape)."""

    value: Tensor

    def write(self, out: Tensor, factor: Tensor | None) -> None:
        """See `Term`."""
        if factor is None and out.dtype == self.value.dtype and out.shape[1:] == self.value.shape[2:]:
            torch.sum(self.value, 1, out=out)
        else:
            super().write(out, factor)


@dataclass(frozen=True)
class Shift(Formed):
    """A bias: the sum of the output's gradient (k, b, positions, c) over positions, or other `axes`."""

    grad: Tensor
    axes: tuple[int, ...] = (2,)

    @cached_property
    def value(self) -> Tensor:  # type: ignore[override]
        """Formed."""
        return self.grad.sum(self.axes)

    def summed(self, factor: Tensor | None) -> Tensor:
        """See `Term`."""
        return self.grad.sum((1, *self.axes)) if factor is None else total(self.value, factor)


@dataclass(frozen=True)
class Product(Term):
    """Σ_p l_p ⊗ r_p with `left` (k, b, P, m) and `right` (k, b, P, n), for a matrix (m, n)."""

    left: Tensor
    right: Tensor
    cache: list[Tensor] = field(default_factory=list, repr=False)

    def lengths(self) -> Lengths:
        """Take the cheaper of Gram matrices over positions and gradients formed."""
        short = shortens()
        if self.small:
            return Lengths.formed(self.formed())
        positions = self.left.shape[2]
        if positions > 1 and self.ghost:
            squares, mass = self._ghost()
        else:
            left, right = (lengths_of_rows(part, loosely=positions > 1) for part in (self.left, self.right))
            if positions == 1:
                return Lengths.exactly((left * right).squeeze(2))
            mass = (left * right).sum(2)
            squares = (self._norms() + self._added(left, right, mass)).square()
        if short:
            squares = (squares.sqrt() + SHORT * mass).square()
        return Lengths.bounded(squares, mass, positions)

    def _added(self, left: Tensor, right: Tensor, mass: Tensor) -> Tensor:
        """Return what forming may add to a gradient or take from it, by the norms (k, b, P) and S (k, b)."""
        return gamma(self.left.shape[2], unit_of(self.left)) * mass + self._lost(left, right)

    def _lost(self, left: Tensor, right: Tensor) -> Tensor:
        """Return what underflow and flushing to zero may take from what is formed, by the norms (k, b, P).

        Of P (m + n) products and factors each loses at most τ, times what it is multiplied by.
        """
        return TINY * self._losing * (1 + left.sum(2)) * (1 + right.sum(2))

    @property
    def _losing(self) -> int:
        positions, m, n = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        return positions * (m + n + positions)

    def _ghost(self) -> tuple[Tensor, Tensor]:
        """Return bounds of ‖G‖² and S (k, b) from Gram matrices.

        Their diagonals have the norms of l_p and r_p. The sum of squares loses by underflow at most 8/τ times
        the square of what a gradient loses.
        """
        positions, m, n = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        above, share = _margins(positions, m, n, unit_of(self.left), shortens())
        found = []
        for left, right in self._split(8 * positions**2):
            one, other = gram(left), gram(right)
            diagonals = torch.stack([part.diagonal(dim1=1, dim2=2) for part in (one, other)]).double()
            norms = diagonals.mul_(above).add_(2 * max(m, n) * TINY).sqrt_()
            mass, lost = (norms[0] * norms[1]).sum(1), norms.sum(2).add_(1)
            squares = (one * other).sum((1, 2), dtype=torch.float64).add_(mass.square(), alpha=share)
            squares.add_((lost[0] * lost[1]).square_(), alpha=8 * TINY * self._losing**2)
            found.append((squares, mass))
        squares, mass = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        return squares.view(self.left.shape[:2]), mass.view(self.left.shape[:2])

    def _norms(self) -> Tensor:
        """Return ‖Ĝ‖ (k, b), from above."""
        each = 4 * self.left.shape[3] * self.right.shape[3]
        parts = [lengths_of_rows(torch.bmm(a.mT, b).flatten(1)) for a, b in self._split(each)]
        return torch.cat(parts).view(self.left.shape[:2])

    def _split(self, each: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some examples' left and right at a time, where one of them takes `each` bytes."""
        step = max(1, WORKSPACE["cuda" if self.left.is_cuda else "cpu"] // each)
        left, right = self.left.flatten(0, 1), self.right.flatten(0, 1)
        if len(left) <= step:
            return iter([(left, right)])
        return zip(torch.split(left, step), torch.split(right, step), strict=True)

    @property
    def ghost(self) -> bool:
        """Whether Gram matrices are cheaper than gradients: by far, where their bound is a loose one."""
        positions, m, n = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        return (1 + 0.4 * shortens()) * positions * (m + n) < m * n

    @property
    def small(self) -> bool:
        """Whether formed gradients take little room, or little beside the factors they come from."""
        positions, m, n = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        return positions > 1 and (m * n <= TABLE or 2 * m * n <= positions * (m + n))

    def formed(self) -> Tensor:
        """See `Term`; kept where it is small."""
        if self.cache:
            return self.cache[0]
        value = torch.bmm(self.left.flatten(0, 1).mT, self.right.flatten(0, 1))
        value = value.view(*self.left.shape[:2], *value.shape[1:])
        if self.small:
            self.cache.append(value)
        return value

    def error(self) -> Tensor | float:
        """See `Term`."""
        if self.small:
            return 0.0
        left, right = (lengths_of_rows(part, loosely=True) for part in (self.left, self.right))
        mass = (left * right).sum(2)
        return self._added(left, right, mass) + SHORT * shortens() * mass

    def summed(self, factor: Tensor | None) -> Tensor:
        """One product per client over all its examples' positions."""
        if self.cache:
            return total(self.cache[0], factor)
        left, right = self.left, self.right
        if factor is not None:
            left, right = left.to(factor.dtype), right.to(factor.dtype)
            scale = factor[..., None, None]
            left, right = (left * scale, right) if left.numel() <= right.numel() else (left, right * scale)
        return torch.bmm(_rows(left).mT, _rows(right))

    def write(self, out: Tensor, factor: Tensor | None) -> None:
        """See `Term`; on CUDA in its place. On a CPU products are parallel only if they lie together."""
        fits = self.left.is_cuda and out.dim() == 3 and out.dtype == self.left.dtype
        if fits and factor is None and not self.cache:
            torch.bmm(_rows(self.left).mT, _rows(self.right), out=out)
        else:
            super().write(out, factor)


@dataclass(frozen=True)
class Lookup(Term):
    """An embedding: row ids_p of a table of `rows` rows gets r_p; ids (k, b, P), `right` (k, b, P, n)."""

    ids: Tensor
    right: Tensor
    rows: int

    def lengths(self) -> Lengths:
        """Sum what falls on the same row before squaring, in double precision."""
        positions, n = self.right.shape[2:]
        if positions == 1:
            return Lengths.exactly(self.mass)
        errors = gamma(positions**2 + n + 3, DOUBLE) * self.mass.square()
        squares = pair(self, self) if positions <= n else self._squares()
        return Lengths.bounded(squares + errors, self.mass, positions)

    @cached_property
    def mass(self) -> Tensor:
        """S (k, b)."""
        return lengths_of_rows(self.right, loosely=self.right.shape[2] > 1).sum(2)

    def _squares(self) -> Tensor:
        n = self.right.shape[3]
        clients, size = self.ids.shape[:2]
        example = torch.arange(clients * size, device=self.ids.device).view(clients, size, 1)
        touched, where = torch.unique(self.ids + example * self.rows, return_inverse=True)
        sums = self.right.new_zeros(len(touched), n, dtype=torch.float64)
        sums.index_put_((where.flatten(),), self.right.reshape(-1, n).double(), accumulate=True)
        squares = sums.new_zeros(clients * size)
        squares.index_put_((touched // self.rows,), sums.square().sum(-1), accumulate=True)
        return squares.view(clients, size)

    def formed(self) -> Tensor:
        """See `Term`."""
        return self._scatter(self.ids.flatten(0, 1), self.right.flatten(0, 1)).view(
            *self.ids.shape[:2], self.rows, -1
        )

    def error(self) -> Tensor:
        """See `Term`."""
        return gamma(self.ids.shape[2], unit_of(self.right)) * self.mass

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
    """Return Σ_i s_i G_i (k, …) of formed gradients (k, b, …), in the precision of the factors."""
    if factor is None:
        return value.sum(1)
    flat = torch.bmm(factor[:, None], value.reshape(*value.shape[:2], -1).to(factor.dtype))
    return flat.view(len(value), *value.shape[2:])


def pair(one: Product | Lookup, other: Product | Lookup) -> Tensor:
    """Return ⟨G_i, H_i⟩ (k, b) of two uses of the same matrix, in double precision."""
    if isinstance(one, Lookup) and isinstance(other, Product):
        return pair(other, one)
    rights = torch.matmul(one.right.double(), other.right.double().mT)
    if isinstance(one, Lookup):
        assert isinstance(other, Lookup)
        return torch.where(one.ids[..., :, None] == other.ids[..., None, :], rights, 0.0).sum((2, 3))
    if isinstance(other, Lookup):
        lefts = torch.gather(one.left, 3, other.ids[..., None, :].expand(*one.left.shape[:3], -1))
    else:
        lefts = torch.matmul(one.left.double(), other.left.double().mT)
    return (lefts * rights).sum((2, 3))


def together(terms: Sequence[Term]) -> list[Term]:
    """Take the products of one matrix as a single one over the positions of all."""
    products = [term for term in terms if isinstance(term, Product)]
    if len(products) < 2:
        return list(terms)
    merged = Product(
        torch.cat([one.left for one in products], 2), torch.cat([one.right for one in products], 2)
    )
    return [merged, *(term for term in terms if not isinstance(term, Product))]


def lengths_of(terms: Sequence[Term]) -> Lengths:
    """Return how long the sum of all uses of one parameter is at most."""
    each = [term.lengths() for term in terms]
    if len(each) == 1:
        return each[0]
    mass = torch.stack([one.masses for one in each]).sum(0)
    positions = sum(one.positions for one in each)
    tables = [term for term in terms if isinstance(term, Product | Lookup)]
    if len(tables) == len(terms) and not any(isinstance(term, Product) and term.small for term in tables):
        cross = [2.0 * pair(one, other) for i, one in enumerate(tables) for other in tables[:i]]
        widest = max(
            part.shape[-1] for term in tables for part in (term.right, getattr(term, "left", term.right))
        )
        errors = gamma(2 * widest + positions**2 + 3, DOUBLE) * mass.square()
        squares = torch.stack([*(one.norms.square() for one in each), *cross]).sum(0) + errors
    else:
        formed = torch.stack([term.formed().double() for term in terms]).sum(0)
        norms = lengths_of_rows(formed.flatten(2))
        for term in terms:
            norms = norms + term.error()
        squares = norms.square()
    return Lengths.bounded(squares, mass, positions)
