"""Random projections P (d × D) that exist as a seed: applied in blocks, stored only where that is cheaper.

A seeded projection is P = M G, with G (d × D) independent standard Gaussians drawn column block by column
block from a key, and a small matrix M (d × d) that puts the rows right:

    gaussian      M = diag(1/‖g_1‖, …, 1/‖g_d‖)         rows uniform on the unit sphere of R^D
    orthonormal   M = L⁻¹,  L Lᵀ = G Gᵀ (Cholesky)      what Gram–Schmidt over the rows gives: P Pᵀ = I_d

M takes one pass over the blocks; after that P is d² numbers and a seed. Everyone who knows the seed has the
same P: it is never transmitted. Up to `memory` bytes, P is kept after the first pass, since drawing it again
costs more than reading it; beyond, every application draws the blocks anew, the next one while the present
one is in use.

`advance` moves x and measures P x' in a single pass. A training step needs both Pᵀc and P x', so regenerating
blocks would otherwise happen twice.

Reference: Lin, Han, Li, Zhang, "Personalized federated learning towards communication efficiency, robustness
and fairness", NeurIPS 2022 (row-normalised Gaussian P, Proposition 7).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key

Kind = Literal["gaussian", "orthonormal", "identity"]

COLUMNS = 4096
"""Columns of G drawn from one key. Part of the definition of P: another width gives another P."""

MEMORY = 2 << 30
"""Default bound, in bytes, on a stored P."""


class Projection(Protocol):
    """A linear map P from R^D to R^d, for k stacked vectors."""

    @property
    def rows(self) -> int:
        """The projected size d."""

    @property
    def columns(self) -> int:
        """The full size D."""

    def apply(self, x: Tensor) -> Tensor:
        """Return P x: (k, D) to (k, d)."""

    def lift(self, c: Tensor) -> Tensor:
        """Return Pᵀ c: (k, d) to (k, D)."""

    def advance(self, x: Tensor, descent: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        """Return x' = x − descent + Pᵀ pull and P x'."""


@dataclass(frozen=True)
class IdentityProjection:
    """P = I: nothing is projected away.

    >>> x = torch.ones(2, 3)
    >>> IdentityProjection(3).advance(x, 0.5 * x, x)[1]
    tensor([[1.5000, 1.5000, 1.5000],
            [1.5000, 1.5000, 1.5000]])
    """

    columns: int

    @property
    def rows(self) -> int:
        """D: the identity keeps every coordinate."""
        return self.columns

    def apply(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def lift(self, c: Tensor) -> Tensor:
        """Return c."""
        return c

    def advance(self, x: Tensor, descent: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        """Return x' twice."""
        moved = x - descent + pull
        return moved, moved


@dataclass(frozen=True)
class Seeded:
    """P = M G with G drawn in blocks from `key`; `stored` is P itself where it is kept.

    `mixing` is M: (d,) for a diagonal one, (d, d) otherwise.

    >>> p = gaussian(3, 5000, Key(1))
    >>> x = torch.randn(2, 5000, generator=Key(2).torch())
    >>> seldom = gaussian(3, 5000, Key(1), memory=0)
    >>> seldom.stored is None, torch.allclose(p.apply(x), seldom.apply(x), atol=1e-5)
    (True, True)
    >>> p.lift(torch.eye(3)).norm(dim=1)
    tensor([1.0000, 1.0000, 1.0000])
    """

    rows: int
    columns: int
    key: Key
    mixing: Tensor
    stored: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """Return P x: (k, D) to (k, d)."""
        self._check(x, self.columns)
        if self.stored is not None:
            return x @ self.stored.T
        total = x.new_zeros(x.shape[0], self.rows)
        for part, block in self._blocks(x.device):
            total.addmm_(x[:, part], block.T)
        return self._mixed(total)

    def lift(self, c: Tensor) -> Tensor:
        """Return Pᵀ c: (k, d) to (k, D)."""
        self._check(c, self.rows)
        if self.stored is not None:
            return c @ self.stored
        weights = self._unmixed(c)
        lifted = c.new_empty(len(c), self.columns)
        for part, block in self._blocks(c.device):
            lifted[:, part] = weights @ block
        return lifted

    def advance(self, x: Tensor, descent: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        """Return x' = x − descent + Pᵀ pull and P x', in one pass over P."""
        self._check(x, self.columns)
        self._check(pull, self.rows)
        moved = x - descent
        if self.stored is not None:
            moved.addmm_(pull, self.stored)
            return moved, moved @ self.stored.T
        weights = self._unmixed(pull)
        total = x.new_zeros(x.shape[0], self.rows)
        for part, block in self._blocks(x.device):
            moved[:, part].addmm_(weights, block)
            total.addmm_(moved[:, part], block.T)
        return moved, self._mixed(total)

    def _blocks(self, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        return ((part, block.to(device)) for part, block in _blocks(self.rows, self.columns, self.key))

    def _mixed(self, gx: Tensor) -> Tensor:
        """From (G x)ᵀ to (M G x)ᵀ."""
        return gx * self.mixing if self.mixing.dim() == 1 else gx @ self.mixing.T

    def _unmixed(self, c: Tensor) -> Tensor:
        """From cᵀ to (Mᵀ c)ᵀ, so that Pᵀ c = Gᵀ (Mᵀ c)."""
        return c * self.mixing if self.mixing.dim() == 1 else c @ self.mixing

    def _check(self, vectors: Tensor, size: int) -> None:
        if vectors.dim() != 2 or vectors.shape[1] != size:
            raise UserError(
                f"a projection {self.rows} × {self.columns} takes stacked vectors (k, {size}) here, "
                f"got {tuple(vectors.shape)}"
            )


def gaussian(
    rows: int, columns: int, key: Key, *, memory: int = MEMORY, device: torch.device | str = "cpu"
) -> Seeded:
    """Return the projection with independent rows, uniform on the unit sphere of R^columns.

    >>> gaussian(3, 2, Key(1))
    Traceback (most recent call last):
    trilemma.base.errors.UserError: cannot project 2 parameters onto 3: allowed are 1 to 2 dimensions
    """
    kept = _Kept.of(rows, columns, memory)
    squares = torch.zeros(rows, dtype=torch.float64)
    for part, block in _blocks(rows, columns, key):
        squares += block.square().sum(1, dtype=torch.float64)
        kept.put(part, block)
    scale = squares.rsqrt().float()
    return _seeded(rows, columns, key, scale, kept, device)


def orthonormal(
    rows: int, columns: int, key: Key, *, memory: int = MEMORY, device: torch.device | str = "cpu"
) -> Seeded:
    """Return the projection with orthonormal rows: the Gaussian one after Gram–Schmidt.

    >>> p = orthonormal(3, 5000, Key(1))
    >>> bool((p.apply(p.lift(torch.eye(3))) - torch.eye(3)).abs().max() < 1e-5)
    True
    """
    kept = _Kept.of(rows, columns, memory)
    gram = torch.zeros(rows, rows, dtype=torch.float64)
    for part, block in _blocks(rows, columns, key):
        wide = block.double()
        gram.addmm_(wide, wide.T)
        kept.put(part, block)
    lower = torch.linalg.cholesky(gram)
    inverse = torch.linalg.solve_triangular(lower, torch.eye(rows, dtype=torch.float64), upper=False)
    return _seeded(rows, columns, key, inverse.float(), kept, device)


def projection(
    kind: Kind,
    rows: int,
    columns: int,
    seed: int,
    *,
    memory: int = MEMORY,
    device: torch.device | str = "cpu",
) -> Projection:
    """Return the projection that everyone who knows `seed` has; the latest few are remembered.

    >>> projection("gaussian", 4, 100, seed=7) is projection("gaussian", 4, 100, seed=7)
    True
    >>> projection("identity", 100, 100, seed=7).rows
    100
    """
    return _remembered(kind, rows, columns, seed, memory, torch.device(device))


@lru_cache(maxsize=2)
def _remembered(
    kind: Kind, rows: int, columns: int, seed: int, memory: int, device: torch.device
) -> Projection:
    if kind == "identity":
        return IdentityProjection(columns)
    make = gaussian if kind == "gaussian" else orthonormal
    return make(rows, columns, Key(seed).fold("projection"), memory=memory, device=device)


@dataclass(frozen=True)
class _Kept:
    """G, where there is room for it."""

    matrix: Tensor | None

    @staticmethod
    def of(rows: int, columns: int, memory: int) -> _Kept:
        if not 1 <= rows <= columns:
            raise UserError(
                f"cannot project {columns} parameters onto {rows}: allowed are 1 to {columns} dimensions"
            )
        return _Kept(torch.empty(rows, columns) if 4 * rows * columns <= memory else None)

    def put(self, part: slice, block: Tensor) -> None:
        if self.matrix is not None:
            self.matrix[:, part] = block


def _seeded(
    rows: int, columns: int, key: Key, mixing: Tensor, kept: _Kept, device: torch.device | str
) -> Seeded:
    """Turn the kept G into P, in place, block by block: M G needs no second matrix of that size."""
    if kept.matrix is not None:
        for start in range(0, columns, COLUMNS):
            block = kept.matrix[:, start : start + COLUMNS]
            block.copy_(mixing[:, None] * block if mixing.dim() == 1 else mixing @ block)
    stored = None if kept.matrix is None else kept.matrix.to(device)
    return Seeded(rows, columns, key, mixing.to(device), stored)


def _blocks(rows: int, columns: int, key: Key) -> Iterator[tuple[slice, Tensor]]:
    """Yield the column blocks of G, each valid until the next is asked for; the next is drawn meanwhile.

    Two buffers take turns, so that a pass over any P needs the memory of two blocks.
    """
    buffers = [torch.empty(rows * min(COLUMNS, columns)) for _ in range(2)]

    def draw(number: int) -> Tensor:
        start = number * COLUMNS
        width = min(COLUMNS, columns - start)
        block = buffers[number % 2][: rows * width].view(rows, width)
        return block.normal_(generator=key.fold("columns", start).torch())

    count = -(-columns // COLUMNS)
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(draw, 0)
        for number in range(count):
            block = coming.result()
            if number + 1 < count:
                coming = ahead.submit(draw, number + 1)
            yield slice(number * COLUMNS, number * COLUMNS + block.shape[1]), block
