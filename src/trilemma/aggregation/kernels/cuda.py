"""The three passes on a CUDA device: Triton kernels where Triton is installed, else plain torch operations.

float64 messages always take the plain operations: an H200 multiplies float64 on tensor cores, and the plain
passes use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation.kernels.cuda_network import window_program
from trilemma.aggregation.passes import blocks, columns, combine
from trilemma.aggregation.passes.columns import Columns, Mixture, Window
from trilemma.aggregation.passes.gram import Geometry, clean, halfway, plain_pass, saturated
from trilemma.aggregation.steps.types import Array, Numpy

CHUNK = 1024
"""Columns over which the Gram kernel sums in float32."""

TOGETHER, PIECE = 1 << 24, 1 << 11
"""On a GPU a plain pass writes so many numbers at once, and multiplies so many columns of them."""

NEAR, TINY = 2.0**6, 1e-24
"""Squared distances from the origin may be so many times those between rows, and these at least so large."""

IN_REGISTERS = 128
"""A thread sorts up to so many values in its registers; beyond, torch sorts."""

SLAB = 1 << 18
"""Columns mixed at once in a chain that ends coordinate by coordinate."""


def kernels() -> ModuleType | None:
    """Return the Triton kernels, or None where Triton is not installed."""
    return blocks.compiled("cuda_kernels")


def shifted_gram(X: Tensor, k: int, precise: bool) -> Array:
    """Return ⟨x_i − x_k, x_j − x_k⟩ for all rows and the origin, (n+1, n+1) float64."""
    compiled = kernels()
    if precise or compiled is None or X.dtype == torch.float64:
        return plain_pass(X, k)
    X = _row_major(X)
    n, d = X.shape
    height = n + 1
    rows = min(_tile(height), 128)
    tiles = -(-height // rows)
    pairs = [(i, j) for i in range(tiles) for j in range(i, tiles)]
    one_tile = tiles == 1
    programs = max(1, min((1 if one_tile else 2) * _processors(X) // len(pairs), -(-d // CHUNK)))
    W = torch.zeros(programs, len(pairs), rows, rows, dtype=torch.float64, device=X.device)
    index = torch.tensor(pairs, dtype=torch.int32, device=X.device)
    compiled.shifted_gram[(programs, len(pairs))](
        X,
        X[k],
        W,
        index,
        n,
        d,
        X.stride(0),
        CHUNK,
        rows,
        64 if one_tile else 32,  # two tiles of 64 columns in three stages would not fit shared memory
        one_tile,
        num_warps=8,
        num_stages=3,
    )
    tiled = W.sum(0).cpu().numpy()
    G = np.zeros((tiles * rows, tiles * rows))
    for (i, j), block in zip(pairs, tiled, strict=True):
        G[j * rows : (j + 1) * rows, i * rows : (i + 1) * rows] = block.T
        G[i * rows : (i + 1) * rows, j * rows : (j + 1) * rows] = block
    return clean(G[:height, :height])


def pass_in_pieces(X: Tensor, k: int) -> Tensor:
    """The same on a GPU, as a sum of many products of a few columns: one long product keeps it idle.

    A block of columns is written once, as it is read: shifted, in float64, with the origin as its last row.
    """
    n, d = X.shape
    most = max(1, TOGETHER // (n + 1) // PIECE)
    width = min(most, -(-d // PIECE)) * PIECE
    block = torch.empty(n + 1, width, dtype=torch.float64, device=X.device)
    total = block.new_zeros(n + 1, n + 1)
    for lo, hi in blocks.spans(d, max(width, 1)):
        if hi - lo < width:
            block[:, hi - lo :] = 0.0
        columns = saturated(X[:, lo:hi])
        reference = columns[k].to(torch.float64)
        torch.sub(columns, reference, out=block[:n, : hi - lo])
        torch.neg(reference, out=block[n, : hi - lo])
        pieces = block.view(n + 1, -1, PIECE).transpose(0, 1)
        total += torch.bmm(pieces, pieces.mT).sum(0)
    return total


def products(X: Tensor) -> Tensor:
    """Return X Xᵀ (n, n) of float32 rows: products of `CHUNK` columns are float32, and added in float64."""
    X = _row_major(X)
    whole = X.shape[1] // CHUNK * CHUNK
    pieces = X[:, :whole].view(len(X), whole // CHUNK, CHUNK).transpose(0, 1)
    rest = X[:, whole:]
    found = _float32_product(pieces, pieces.mT).sum(0, dtype=torch.float64)
    return found + _float32_product(rest, rest.T)


def in_range(X: Tensor, found: Tensor) -> bool:
    """Tell whether products of rows are what float32 holds: finite, and none lost because it is too small.

    >>> X = torch.tensor([[1e-30, 0.0], [1.0, 0.0], [0.0, 0.0]])
    >>> in_range(X, X @ X.T), in_range(X[1:], X[1:] @ X[1:].T)
    (False, True)
    """
    inner = found.numpy()
    if not np.isfinite(inner).all():
        return False
    return not any(bool(X[int(row)].any()) for row in np.flatnonzero(inner.diagonal() <= TINY))


def around_origin(inner: Array) -> Geometry | None:
    """Return the geometry of float32 rows around the origin, None unless most of them lie around it.

    `inner` (n, n) are their `products`. Messages that are mostly noise do. No row has to be found near the
    others then, and nothing is shifted.
    """
    if not np.isfinite(inner).all():  # some rows are not, or only their squares
        return None
    around = Geometry(np.pad(inner, (0, 1)), len(inner))
    near, away = _nearest_two(around), np.sort(inner.diagonal())[len(inner) // 2]
    if not (away <= NEAR * near and near > TINY):  # nearly always it is: no row is sorted then
        near = halfway(around.distances).min()
    return around if away <= NEAR * near and near > TINY else None


def _nearest_two(around: Geometry) -> float:
    """Return the squared distance of the two rows that are nearest: no row has half of the others nearer."""
    if around.n < 2:
        return 0.0
    apart = around.distances.copy()
    np.fill_diagonal(apart, np.inf)
    return float(apart.min())


def weighted_sum(X: Tensor, rows: Numpy, used: Array) -> Tensor:
    """Return Σ used_q X[rows_q] (d,)."""
    compiled = kernels()
    if compiled is None or X.dtype == torch.float64 or not X.shape[1] or not len(rows):
        return combine.plain_weighted_sum(X, rows, used)
    X = _row_major(X)
    d = X.shape[1]
    out = torch.empty(d, dtype=X.dtype, device=X.device)
    index = torch.from_numpy(rows).to(X.device)
    weights = torch.from_numpy(used).to(X.device)
    compiled.weighted_sum[(-(-d // 1024),)](
        X, out, index, weights, len(rows), d, X.stride(0), 1024, num_warps=4
    )
    return out


def window_means(X: Tensor, rows: Any, window: Window, mixture: Mixture | None) -> Columns:
    """Return the window means of X[rows], or of A X[rows]."""
    exact = mixture is not None and mixture.reference is None
    if kernels() is None or exact or X.dtype == torch.float64 or len(X) > IN_REGISTERS or not X.shape[1]:
        return columns.plain_window_means(X, rows, window, mixture)
    X = _row_major(X)
    if mixture is None and len(rows) == len(X):
        return _window_of_slab(X, X, window)
    index = torch.as_tensor(rows, device=X.device)
    parts = []
    for lo in range(0, X.shape[1], SLAB):
        slab = X[index, lo : lo + SLAB]
        if mixture is None:
            parts.append(_window_of_slab(slab, slab, window))
            continue
        offset = X[mixture.reference, lo : lo + SLAB].to(torch.float32)
        shifted = slab.to(torch.float32) - offset
        A = torch.as_tensor(mixture.A, dtype=torch.float32, device=X.device)
        part = _window_of_slab(_float32_product(A, shifted), shifted, window)
        value = (part.value.to(torch.float64) + offset).to(X.dtype)
        parts.append(Columns(value, part.shares, part.squares))
    shares, squares = sum(part.shares for part in parts), sum(part.squares for part in parts)
    return Columns(torch.cat([part.value for part in parts]), np.asarray(shares), np.asarray(squares))


def _window_of_slab(V: Tensor, Y: Tensor, window: Window) -> Columns:
    """Window means of V, with the shares of its rows; squared distances are those of the rows of Y."""
    found = sorted_windows(V, window)
    return Columns(found.value, tally_shares(V, found, window) / window.size, tally_squares(Y, found.value))


@dataclass(frozen=True)
class Windows:
    """Every column's window: mean (d,), first and last value (2, d), and 2·rank + whether it is tied (d,)."""

    value: Tensor
    edges: Tensor
    codes: Tensor


def sorted_windows(V: Tensor, window: Window) -> Windows:
    """Sort every column in one thread's registers and return its window."""
    height, d = V.shape
    value = torch.empty(d, dtype=V.dtype, device=V.device)
    edges = torch.empty(2, d, dtype=torch.float32, device=V.device)
    codes = torch.empty(d, dtype=torch.int32, device=V.device)
    program, constraints = window_program(height, window)
    _compiled().window_means[(-(-d // 128),)](
        V, value, edges, codes, d, V.stride(0), height, program, constraints, 128, num_warps=4
    )
    return Windows(value, edges, codes)


def tally_shares(V: Tensor, found: Windows, window: Window) -> Array:
    """Return how many places of the windows each row of V fills, summed over columns (n,)."""
    slots = _slots(V)
    height, d = V.shape
    _compiled().tally_shares[(len(slots),)](
        V,
        found.edges,
        found.codes,
        slots,
        height,
        d,
        V.stride(0),
        window.size,
        slots.shape[1],
        64,
        num_warps=8,
    )
    return _total(slots, height)


def tally_squares(Y: Tensor, value: Tensor) -> Array:
    """Return the squared distance of every row of Y from the value (n,)."""
    slots = _slots(Y)
    height, d = Y.shape
    _compiled().tally_squares[(len(slots),)](
        Y, value, slots, height, d, Y.stride(0), slots.shape[1], 64, num_warps=8
    )
    return _total(slots, height)


def _compiled() -> ModuleType:
    compiled = kernels()
    assert compiled is not None
    return compiled


def _slots(V: Tensor) -> Tensor:
    """Room for a sum per program and row (programs, rows)."""
    programs = max(1, min(4 * _processors(V), -(-V.shape[1] // 64)))
    return torch.empty(programs, _tile(len(V)), dtype=torch.float64, device=V.device)


def _total(slots: Tensor, height: int) -> Array:
    """Add up the programs, in their order."""
    result: Array = slots.sum(0)[:height].cpu().numpy()
    return result


def _tile(height: int) -> int:
    """Rows of a tile that holds `height` rows: a power of two."""
    return max(16, 1 << (height - 1).bit_length())


def _float32_product(A: Tensor, Y: Tensor) -> Tensor:
    """Return A Y in float32, whatever the process allows matrix products to be rounded to."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return A @ Y
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _row_major(X: Tensor) -> Tensor:
    return X if X.stride(1) == 1 else X.contiguous()


def _processors(X: Tensor) -> int:
    return int(torch.cuda.get_device_properties(X.device).multi_processor_count)
