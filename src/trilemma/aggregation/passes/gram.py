"""The geometry of the messages: all a geometric rule ever needs to know about X.

For messages X (n×d) a geometric rule only needs the n×n Gram matrix G = X Xᵀ. In floating point G is a poor
way to hold it: with a common offset of 10⁶ times the spread, the spread sits in the last digits of G.
`Geometry`
holds the inner products around a reference row r close to the majority instead,

    g_ij = ⟨x_i − r, x_j − r⟩,   D_ij = g_ii + g_jj − 2 g_ij = ‖x_i − x_j‖²   (the origin is one more point)

which are additive over shards of the columns as G is, know nothing of an offset, and let one row of 10³⁰
stand beside rows of 1 without harm.

One pass over X computes them: a block of columns is shifted by r, multiplied out, and added up in float64.
The error of g_ij is u·‖x_i − r‖·‖x_j − r‖, with u near 2⁻⁵² for float64 products, used below 2²⁰ columns.
From there on products and sums within a block are float32: u ≤ 64·2⁻²⁴ = 4·10⁻⁶ in a block at the very worst,
of random sign over at least a thousand blocks. The pass is checked afterwards: if the reference turns out to
be far from the majority, or float32 left its range, it is repeated in float64 with a better reference. Rows
with NaN or infinity show up as NaN on the diagonal.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation.passes import blocks, inputs
from trilemma.aggregation.steps.types import Array, Vectors
from trilemma.base.errors import UserError

WIDE = 1 << 20
"""From so many columns on, products within a block of columns are float32."""

DIRECT = 1 << 15
"""Up to so many differences between entries, distances are computed from the differences themselves."""

LIMIT = 1e145
"""float64 messages saturate here, so that squares stay finite. float32 and half precision cannot reach it."""


@dataclass(frozen=True)
class Geometry:
    """Inner products ⟨x_i − r, x_j − r⟩ of the rows and of the origin (last), for a point r near most rows.

    `base` is the row that r is, if it is one; `+` brings both parts to the row that is central in their sum.
    `mass` are the public weights of the rows; None: all alike.

    >>> X = np.array([[0.0, 3.0], [4.0, 0.0]])
    >>> geometry(X).distances
    array([[ 0., 25.],
           [25.,  0.]])
    >>> parts = geometry(X[:, :1]) + geometry(X[:, 1:])
    >>> bool((geometry(X).distances == parts.distances).all())
    True
    """

    inner: Array
    base: int | None = None
    mass: Array | None = None

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.inner) - 1

    @property
    def masses(self) -> Array:
        """The weights of the rows (n,); ones where all are alike."""
        return np.ones(self.n) if self.mass is None else self.mass

    def counted(self, f: int) -> tuple[float, float]:
        """Return the weight of the f heaviest rows, and that of all: f and n where all are alike."""
        return (f, self.n) if self.mass is None else (heaviest(self.mass, f), float(self.mass.sum()))

    @functools.cached_property
    def squares(self) -> Array:
        """Squared distances between the rows and the origin (n+1, n+1)."""
        own = self.inner.diagonal()
        result: Array = np.maximum(own[:, None] + own[None, :] - 2.0 * self.inner, 0.0)
        np.fill_diagonal(result, np.where(np.isfinite(own), 0.0, np.nan))
        return result

    @property
    def distances(self) -> Array:
        """Squared distances between the rows (n, n)."""
        return self.squares[:-1, :-1]

    @property
    def norms(self) -> Array:
        """Length of each row (n,)."""
        return np.sqrt(self.squares[-1, :-1])

    @property
    def gram(self) -> Tensor:
        """The rows' Gram matrix (n, n)."""
        return torch.from_numpy(self.rebased(self.n).inner[:-1, :-1].copy())

    @property
    def finite(self) -> Any:
        """Which rows are free of NaN and infinity (n,), bool."""
        return np.isfinite(self.inner.diagonal()[:-1])

    def __add__(self, other: Geometry) -> Geometry:
        base = int(np.argmin(halfway(self.distances + other.distances)))
        return Geometry(self.rebased(base).inner + other.rebased(base).inner, base)

    def select(self, rows: Any) -> Geometry:
        """Return the geometry of some of the rows."""
        kept = np.append(np.arange(self.n)[rows], self.n)
        mass = None if self.mass is None else self.mass[kept[:-1]]
        return Geometry(self.inner[np.ix_(kept, kept)], mass=mass)

    def rebased(self, row: int) -> Geometry:
        """Return the same geometry around another row."""
        if row == self.base:
            return self
        to = self.inner[row]
        return Geometry(self.inner - (to[:, None] + to[None, :]) + to[row], row, self.mass)

    def mixed(self, A: Array) -> Geometry:
        """Return the geometry of the rows of A X, for A of shape (k, n).

        With the origin taking the missing shares 1 − Σ_j a_ij, the new rows and the origin are affine
        combinations of the old points. Their differences from one of them, b, have small coefficients, so
        that nothing is lost when the new rows are close together and far from the old ones.
        """
        full = np.zeros((len(A) + 1, self.n + 1))
        full[:-1, :-1] = A
        rest = 1.0 - full[:, :-1].sum(axis=1)
        full[:, -1] = np.where(np.abs(rest) < 1e-12, 0.0, rest)
        rough = Geometry(full @ self.inner @ full.T)
        differences = full - full[rough.centre()]
        around = differences @ self.inner @ differences.T
        return Geometry(0.5 * (around + around.T), mass=self.mass)  # symmetric bit by bit: ties stay ties

    def centre(self) -> int:
        """Return a row close to the majority: the one whose ⌊n/2⌋ nearest others are nearest."""
        return int(np.argmin(halfway(self.distances)))

    def spread(self, weights: Array) -> Array:
        """Return the distance of each row from Σ weights_i x_i (n,)."""
        rest = 1.0 - weights.sum()
        share = np.append(weights, 0.0 if abs(rest) < 1e-12 else rest)
        to = self.inner @ share
        squared = self.inner.diagonal() - 2.0 * to + share @ to
        result: Array = np.sqrt(np.maximum(squared[:-1], 0.0))
        return result


def heaviest(mass: Array, f: int) -> float:
    """Return the weight W of the f heaviest rows.

    >>> heaviest(np.array([0.25, 0.5, 0.25]), 2)
    0.75
    """
    return float(np.sort(mass)[len(mass) - f :].sum())


def from_gram(G: Tensor | Array) -> Geometry:
    """Return the geometry of messages with Gram matrix G.

    >>> from_gram(np.array([[9.0, 0.0], [0.0, 16.0]])).distances[0, 1].item()
    25.0
    """
    matrix = np.asarray(G.detach().cpu() if isinstance(G, Tensor) else G, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise UserError(f"a Gram matrix must have shape (n, n) with n ≥ 1; got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise UserError("the Gram matrix has entries that are not finite; leave those rows out")
    around_origin = Geometry(np.pad(matrix, (0, 1)))
    return around_origin.rebased(around_origin.centre())


def gram(X: Vectors, *, single: bool = False) -> Tensor:
    """Return X Xᵀ in float64 (n, n), on the CPU; additive over shards of the columns.

    `single`: products within a block of columns in float32, however few columns there are; twice as fast, for
    those who need it no more precise than float32 messages are themselves.

    >>> gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[ 5., 11.],
            [11., 25.]], dtype=torch.float64)
    """
    return geometry(X, single=single).gram


def geometry(X: Vectors, *, single: bool = False) -> Geometry:
    """Return the geometry of the rows of X, accurate whatever their offset and scale; one pass over X.

    `single` as in `gram`: distances are then good to 10⁻⁶ of themselves, and to 10⁻⁵ whatever liars send.
    """
    return measure(inputs.messages(X).X, 0 if single else WIDE)


def measure(X: Tensor, wide: int = WIDE) -> Geometry:
    """Return the geometry of a checked (n, d) tensor; from `wide` columns on products are float32."""
    n, d = X.shape
    if n * n * d <= DIRECT and not X.is_cuda:
        return _direct(X)
    if X.is_cuda and not wide and X.dtype == torch.float32:
        from trilemma.aggregation.kernels import cuda

        if (around := cuda.around_origin(cuda.products(X).cpu().numpy())) is not None:
            return around
    sample = _rough(_sample(X))
    base, precise = sample.centre(), X.dtype == torch.float64 or d < wide or not _tame(sample)
    for _ in range(10):  # each repetition brings the reference closer by a factor of 10⁷ or more
        result = Geometry(fast_pass(X, base, precise), base)
        near = halfway(result.distances)
        if not np.isfinite(near).any():  # the base itself is not finite: choose among rows that are
            finite = finite_rows(X)
            if not finite.any():
                break
            near = np.where(finite, halfway(sample.distances), np.inf)
            base = int(np.argmin(near)) if np.isfinite(near).any() else int(np.argmax(finite))
            continue
        # A liar that is central where the sample looks and far elsewhere is the base of this pass: the
        # further it may be, the more of honest rows' products float32 loses beside its own.
        tolerance = 2.0**20 if precise else 2.0**2
        if near[base] <= tolerance * near.min() and (precise or _in_range(X, result, near)):
            break
        base, precise = int(np.argmin(near)), True
    if X.dtype == torch.float64:  # saturated, hence finite everywhere
        _blank(result.inner, ~finite_rows(X))
    return result


def finite_rows(X: Tensor) -> Any:
    """Return which rows are finite (n,), bool, without a copy of X."""
    return np.array([bool(row.isfinite().all()) for row in X])


def _sample(X: Tensor) -> Tensor:
    """Return up to 512 columns in eight runs (a strided sample would touch a page for each number).

    Of messages on a GPU 128: there the pass takes no longer than a look at 512 on the host.
    """
    d, run = X.shape[1], 16 if X.is_cuda else 64
    if d <= 512:
        return X
    starts = [i * (d - run) // 7 for i in range(8)]
    return torch.cat([X[:, s : s + run] for s in starts], dim=1)


def _rough(X: Tensor) -> Geometry:
    """The geometry of a few columns around their median: good enough to choose a base row."""
    # Laid out column by column where it lies: one copy to the host, sorts along memory, and none of torch's
    # threads woken for a few numbers.
    wide = X.T.to(torch.float64 if X.dtype == torch.float64 else torch.float32)
    values = np.ascontiguousarray((wide.contiguous().cpu() if X.is_cuda else wide).numpy())
    finite = np.isfinite(values).all(axis=0)
    if not finite.all():
        values = values[:, finite]
    columns = np.clip(values, -LIMIT, LIMIT, dtype=np.float64)
    if finite.any():
        middle = np.sort(values, axis=1)[:, values.shape[1] // 2, None]
        columns -= np.clip(middle, -LIMIT, LIMIT, dtype=np.float64)
    inner = np.full((len(X) + 1, len(X) + 1), np.nan)
    kept = np.append(finite, False)
    inner[np.ix_(kept, kept)] = columns.T @ columns
    return Geometry(inner)


def _direct(X: Tensor) -> Geometry:
    """The geometry of a small X, with the base chosen by the distances between all rows."""
    finite = X.isfinite().all(1).cpu().numpy()
    rows = np.pad(X.cpu().to(torch.float64).numpy(), ((0, 1), (0, 0)))
    rows = np.clip(np.where(np.append(finite, True)[:, None], rows, 0.0), -LIMIT, LIMIT)
    differences = rows[:-1, None] - rows[None, :-1]
    distances = np.einsum("ijk,ijk->ij", differences, differences)
    _blank(distances, ~finite)
    base = int(np.argmin(halfway(distances)))
    shifted = rows - rows[base]
    inner = np.einsum("ik,jk->ij", shifted, shifted)  # not BLAS: equal rows get equal bits
    _blank(inner, ~finite)
    return Geometry(inner, base)


def _blank(matrix: Array, rows: Any) -> None:
    """Put NaN into the given rows and columns."""
    matrix[: len(rows)][rows] = np.nan
    matrix[:, : len(rows)][:, rows] = np.nan


def halfway(distances: Array) -> Array:
    """For each row, the squared distance within which it has more than half of the finite rows.

    At least one of these is honest, so a row for which the distance is small is near the honest rows.
    """
    finite = np.isfinite(distances.diagonal())
    result = np.full(len(distances), np.inf)
    if finite.any():
        inner = np.sort(distances[np.ix_(finite, finite)], axis=1)
        result[finite] = inner[:, len(inner) // 2]
    return result


def _tame(sample: Geometry) -> bool:
    """Whether differences look as if their squares fit float32 with room to spare."""
    near = sample.distances[np.ix_(sample.finite, sample.finite)]
    return near.size > 0 and bool(near.max() < 1e24) and bool(np.median(near) > 1e-24)


def _in_range(X: Tensor, result: Geometry, near: Array) -> bool:
    """Whether every row that float32 products call non-finite really is, and none is lost to underflow."""
    suspects = [X[int(i)] for i in np.flatnonzero(~result.finite)]
    return not any(bool(row.isfinite().all()) for row in suspects) and bool(np.median(near) > 1e-24)


def saturated(X: Tensor) -> Tensor:
    """Return float64 messages cut off at `LIMIT`, others as they are."""
    return X.clamp(-LIMIT, LIMIT) if X.dtype == torch.float64 else X


def fast_pass(X: Tensor, k: int, precise: bool) -> Array:
    """One pass over X: ⟨x_i − x_k, x_j − x_k⟩ for all rows and the origin, (n+1, n+1) float64."""
    if X.is_cuda:
        from trilemma.aggregation.kernels import cuda

        return cuda.shifted_gram(X, k, precise)
    kernels = blocks.compiled("cpu")
    n, d = X.shape
    if kernels is None:
        return plain_pass(X, k)
    height = -(-(n + 1) // kernels.TILE) * kernels.TILE
    dtype = np.float64 if precise else np.float32

    def span(lo: int, hi: int) -> Array:
        scratch = np.zeros((height, min(kernels.COLUMNS, hi - lo)), dtype)
        G = np.zeros((height, height))
        if X.dtype == torch.float64:
            array, a, b = blocks.window(saturated(X[:, lo:hi]), 0, hi - lo)
        else:
            array, a, b = blocks.window(X, lo, hi)
        kernels.shifted_gram(array, k, a, b, scratch, G, kernels.TILE)
        return G

    total = np.zeros((height, height))
    with np.errstate(invalid="ignore", over="ignore"):  # rows that are not finite
        for part in blocks.over_spans(span, d, copies=X.dtype == torch.float64 or not blocks.in_place(X)):
            total += part
    upper = np.triu(total[: n + 1, : n + 1])
    return clean(upper + np.triu(upper, 1).T)


def plain_pass(X: Tensor, k: int) -> Array:
    """The same in plain torch operations, on any device."""
    if X.is_cuda:
        from trilemma.aggregation.kernels import cuda

        return clean(cuda.pass_in_pieces(X, k).cpu().numpy())
    total = torch.zeros(len(X) + 1, len(X) + 1, dtype=torch.float64, device=X.device)
    for lo, hi in blocks.spans(X.shape[1]):
        block = torch.nn.functional.pad(saturated(X[:, lo:hi]).to(torch.float64), (0, 0, 0, 1))
        block -= block[k].clone()
        total += block @ block.T
    return clean(total.numpy())


def clean(G: Array) -> Array:
    """Blank the rows that are not finite: infinity on the diagonal becomes NaN in row and column."""
    _blank(G, ~np.isfinite(G.diagonal()))
    return G
