"""The geometry of the messages: all a geometric rule ever needs to know about X.

For messages X (n×d) a geometric rule only needs the n×n Gram matrix G = X Xᵀ. In floating point G is a poor
way to hold it: with a common offset of 10⁶ times the spread, the spread sits in the last digits of G.
`Geometry` holds the same information as squared distances

    D_ij = ‖x_i − x_j‖²,   D_i0 = ‖x_i‖² (the origin is one more point),   G_ij = (D_i0 + D_j0 − D_ij) / 2,

which are additive over shards of the columns as G is, know nothing of an offset, and let one row of 10³⁰
stand beside rows of 1 without harm.

One pass over X computes them. A block of columns is shifted by a reference row r close to the majority,
multiplied out, and added up in float64: D_ij = g_ii + g_jj − 2 g_ij with g_ij = ⟨x_i − r, x_j − r⟩. The
error of D_ij is u·(g_ii + g_jj), with u near 2⁻⁵² for float64 products, used below 2²⁰ columns. From there
on products and sums within a block are float32: u ≤ 64·2⁻²⁴ = 4·10⁻⁶ in a block at the very worst, of
random sign over at least a thousand blocks. The pass is checked afterwards: if the reference turns out to
be far from the majority, or float32 left its range, it is repeated in float64 with a better reference. Rows
with NaN or infinity show up as NaN on the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation import blocks, inputs
from trilemma.aggregation.types import Array, Vectors
from trilemma.errors import UserError

WIDE = 1 << 20
"""From so many columns on, products within a block of columns are float32."""

LIMIT = 1e145
"""float64 messages saturate here, so that squares stay finite. float32 and half precision cannot reach it."""


@dataclass(frozen=True)
class Geometry:
    """Squared distances between the rows, and from each row to the origin (the last row and column).

    >>> X = np.array([[0.0, 3.0], [4.0, 0.0]])
    >>> geometry(X).squares
    array([[ 0., 25.,  9.],
           [25.,  0., 16.],
           [ 9., 16.,  0.]])
    >>> whole, parts = geometry(X), geometry(X[:, :1]) + geometry(X[:, 1:])
    >>> bool((whole.squares == parts.squares).all())
    True
    """

    squares: Array

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.squares) - 1

    @property
    def distances(self) -> Array:
        """Squared distances between the rows (n, n)."""
        return self.squares[:-1, :-1]

    @property
    def norms(self) -> Array:
        """Length of each row (n,)."""
        return np.sqrt(self.squares[-1, :-1])

    @property
    def finite(self) -> Any:
        """Which rows are free of NaN and infinity (n,), bool."""
        return np.isfinite(self.squares.diagonal()[:-1])

    def __add__(self, other: Geometry) -> Geometry:
        return Geometry(self.squares + other.squares)

    def select(self, rows: Any) -> Geometry:
        """Return the geometry of some of the rows."""
        kept = np.append(np.arange(self.n)[rows], self.n)
        return Geometry(self.squares[np.ix_(kept, kept)])

    def mixed(self, A: Array) -> Geometry:
        """Return the geometry of the rows of A X, for A of shape (k, n).

        A point Σ a_j x_j is an affine combination once the origin takes the missing share 1 − Σ a_j, and the
        squared length of Σ u_j x_j with Σ u_j = 0 is −½ uᵀ D u: no detour over the Gram matrix.
        """
        full = np.zeros((len(A) + 1, self.n + 1))
        full[:-1, :-1] = A
        full[:, -1] = 1.0 - full[:, :-1].sum(axis=1)
        full[np.abs(full) < 1e-15] = 0.0  # what is left of 1 − Σ a_j must not meet a large distance
        return Geometry(_squares(-0.5 * (full @ self.squares @ full.T)))

    def reference(self) -> int:
        """Return a row close to the majority: the one whose ⌊n/2⌋ nearest others are the nearest."""
        return int(np.argmin(_halfway(self.distances)))

    def gram(self, around: int | None = None) -> Array:
        """Return ⟨x_i − r, x_j − r⟩ with r the row `around`, or the origin."""
        to = self.squares[: self.n, self.n if around is None else around]
        result: Array = 0.5 * (to[:, None] + to[None, :] - self.distances)
        return result

    def spread(self, weights: Array) -> Array:
        """Return the distance of each row from Σ weights_i x_i (n,)."""
        share = np.append(weights, 1.0 - weights.sum())
        if abs(share[-1]) < 1e-12:
            share[-1] = 0.0
        used = share != 0
        to_all = self.squares[:, used] @ share[used]
        own = 0.5 * float(share[used] @ to_all[used])
        return np.sqrt(np.asarray(np.maximum(to_all[:-1] - own, 0.0)))


def from_gram(G: Tensor | Array) -> Geometry:
    """Return the geometry of messages with Gram matrix G.

    >>> from_gram(np.array([[9.0, 0.0], [0.0, 16.0]])).squares[0, 1].item()
    25.0
    """
    matrix = np.asarray(G.detach().cpu() if isinstance(G, Tensor) else G, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise UserError(f"a Gram matrix must have shape (n, n) with n ≥ 1; got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise UserError("the Gram matrix has entries that are not finite; leave those rows out")
    padded = np.zeros((len(matrix) + 1, len(matrix) + 1))
    padded[:-1, :-1] = matrix
    return Geometry(_squares(padded))


def gram(X: Vectors) -> Tensor:
    """Return X Xᵀ in float64 (n, n), on the CPU; additive over shards of the columns.

    >>> gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[ 5., 11.],
            [11., 25.]], dtype=torch.float64)
    """
    return torch.from_numpy(geometry(X).gram())


def geometry(X: Vectors) -> Geometry:
    """Return all distances between the rows of X, exact whatever their offset and scale; one pass over X."""
    return of(inputs.messages(X).X)


def of(X: Tensor) -> Geometry:
    """Return the geometry of a checked (n, d) tensor."""
    n, d = X.shape
    if n * n * d <= blocks.SMALL and not X.is_cuda:
        return _direct(X.to(torch.float64))
    finite = None
    if X.dtype == torch.float64:  # the only dtype whose squares can overflow float64
        finite = torch.cat([X[:, lo:hi].isfinite().all(1)[:, None] for lo, hi in blocks.spans(d)], 1).all(1)
    sample = _direct(_sample(X))
    k = _start(sample)
    precise = X.dtype == torch.float64 or d < WIDE or not _tame(sample)
    for _ in range(10):  # each repetition brings the reference closer by a factor of 10⁷ or more
        result = Geometry(_squares(_pass(X, k, precise)))
        near = _halfway(result.distances)
        best = int(np.argmin(near))
        tolerance = 2.0**20 if precise else 2.0**6
        if near[k] <= tolerance * near[best] and (precise or _in_range(X, result)):
            break
        k, precise = best, True
    if finite is not None:
        result.squares[:-1][~finite.numpy()] = np.nan
        result.squares[:, :-1][:, ~finite.numpy()] = np.nan
    return result


def _sample(X: Tensor) -> Tensor:
    """Return up to 1024 columns in sixteen runs (a strided sample would touch a page for each number)."""
    d = X.shape[1]
    if d <= 1024:
        return X.to(torch.float64)
    starts = [i * (d - 64) // 15 for i in range(16)]
    return torch.cat([X[:, s : s + 64] for s in starts], dim=1).to(torch.float64)


def _direct(X: Tensor) -> Geometry:
    """Distances of a small X from the differences themselves."""
    rows = torch.cat([X, X.new_zeros(1, X.shape[1])]).clamp(-LIMIT, LIMIT).cpu().numpy()
    with np.errstate(invalid="ignore"):
        differences = rows[:, None, :] - rows[None, :, :]
        squares = np.einsum("ijk,ijk->ij", differences, differences)
    broken = ~X.isfinite().all(1).cpu().numpy()
    squares[:-1][broken] = np.nan
    squares[:, :-1][:, broken] = np.nan
    return Geometry(squares)


def _halfway(distances: Array) -> Array:
    """For each row, the squared distance within which it has more than half of the finite rows.

    At least one of them is honest, so a row for which this is small is near the honest rows.
    """
    finite = np.isfinite(distances.diagonal())
    if not finite.any():
        return np.zeros(len(distances))
    inner = np.sort(distances[np.ix_(finite, finite)], axis=1)
    result = np.full(len(distances), np.inf)
    result[finite] = inner[:, len(inner) // 2]
    return result


def _start(sample: Geometry) -> int:
    return int(np.argmin(_halfway(sample.distances)))


def _tame(sample: Geometry) -> bool:
    """Whether differences look as if their squares fit float32 with room to spare."""
    finite = sample.squares[:-1, :-1][np.ix_(sample.finite, sample.finite)]
    return finite.size > 0 and bool(finite.max() < 1e24) and bool(np.median(finite) > 1e-24)


def _in_range(X: Tensor, result: Geometry) -> bool:
    """Whether every row that float32 products call non-finite really is, and none is lost to underflow."""
    suspects = [X[i] for i in np.flatnonzero(~result.finite)]
    if any(bool(row.isfinite().all()) for row in suspects):
        return False
    return bool(np.median(_halfway(result.distances)) > 1e-24)


def _squares(g: Array) -> Array:
    """Turn inner products around any point into squared distances."""
    own = g.diagonal()
    result = np.maximum(own[:, None] + own[None, :] - 2.0 * g, 0.0)
    np.fill_diagonal(result, np.where(np.isfinite(own), 0.0, np.nan))
    return np.where(np.isfinite(result), result, np.nan)


def _pass(X: Tensor, k: int, precise: bool) -> Array:
    """One pass over X: ⟨x_i − x_k, x_j − x_k⟩ for all rows and the origin, (n+1, n+1) float64."""
    if X.is_cuda:
        from trilemma.aggregation import cuda

        return cuda.shifted_gram(X, k, precise)
    kernels = blocks.compiled()
    n, d = X.shape
    if kernels is None:
        return plain_pass(X, k)
    height = (n + 4) // 4 * 4
    dtype = np.float64 if precise else np.float32

    def span(lo: int, hi: int) -> Array:
        scratch = np.zeros((height, min(kernels.COLUMNS, hi - lo)), dtype)
        G = np.zeros((height, height))
        array, a, b = blocks.window(X, lo, hi)
        if X.dtype == torch.float64:
            array, a, b = blocks.window(_saturated(X[:, lo:hi]), 0, hi - lo)
        kernels.shifted_gram(array, k, a, b, scratch, G)
        return G

    total = np.zeros((height, height))
    for part in blocks.over_spans(span, d):
        total += part
    upper = np.triu(total[: n + 1, : n + 1])
    return upper + np.triu(upper, 1).T


def _saturated(X: Tensor) -> Tensor:
    return X.clamp(-LIMIT, LIMIT) if X.dtype == torch.float64 else X


def plain_pass(X: Tensor, k: int) -> Array:
    """The same in plain torch operations."""
    total = torch.zeros(len(X) + 1, len(X) + 1, dtype=torch.float64, device=X.device)
    for lo, hi in blocks.spans(X.shape[1]):
        block = torch.nn.functional.pad(_saturated(X[:, lo:hi]).to(torch.float64), (0, 0, 0, 1))
        block -= block[k].clone()
        total += block @ block.T
    return total.cpu().numpy()
