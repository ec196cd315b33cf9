"""CPU kernels, compiled by numba: blocks of columns are brought into cache once and worked on there.

Imported only through `trilemma.aggregation.blocks.compiled`, so that the package works without numba.

All loops run over the columns of contiguous rows, the shape LLVM turns into full-width vector code. Sums may
be reordered (once, at compile time): the same input gives the same bits. NaN and infinity keep their meaning.

Gains are over the best plain torch version of the same operation, on two threads of a CPU (AVX-512), float32
messages, as `trilemma bench kernels` measures them.

Longer than most modules, so that numba is imported, and what it compiles is named, in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding

Function = TypeVar("Function", bound=Callable[..., Any])

COLUMNS = 1024
"""Columns per block: four float64 rows of it fill the level-1 cache, all rows of a block stay in level 2."""


def _tile() -> int:
    """Return how many rows are multiplied by as many at a time: their sums are to stay in registers.

    x86 has 32 of them for vectors with AVX-512 and 16 without; everything else of today has 32.
    """
    few = binding.get_process_triple().startswith("x86") and not binding.get_host_cpu_features().get(
        "avx512f"
    )
    return 3 if few else 4


TILE = _tile()


def jit(function: Function) -> Function:
    """Compile without the interpreter lock; keep the result on disk for the next process."""
    compiled = numba.njit(
        nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy"
    )
    return cast(Function, compiled(function))


@jit
def _nine(P: Any, i: int, j: int, w: int, G: Any) -> None:
    """Add the 3×3 inner products of rows i… and j… of P to G, in nine vector registers."""
    zero = P.dtype.type(0)
    s00 = s01 = s02 = s10 = s11 = s12 = s20 = s21 = s22 = zero
    p0, p1, p2 = P[i, :w], P[i + 1, :w], P[i + 2, :w]
    q0, q1, q2 = P[j, :w], P[j + 1, :w], P[j + 2, :w]
    for c in range(w):
        a0, a1, a2 = p0[c], p1[c], p2[c]
        b0, b1, b2 = q0[c], q1[c], q2[c]
        s00 += a0 * b0
        s01 += a0 * b1
        s02 += a0 * b2
        s10 += a1 * b0
        s11 += a1 * b1
        s12 += a1 * b2
        s20 += a2 * b0
        s21 += a2 * b1
        s22 += a2 * b2
    G[i, j] += s00
    G[i, j + 1] += s01
    G[i, j + 2] += s02
    G[i + 1, j] += s10
    G[i + 1, j + 1] += s11
    G[i + 1, j + 2] += s12
    G[i + 2, j] += s20
    G[i + 2, j + 1] += s21
    G[i + 2, j + 2] += s22


@jit
def _sixteen(P: Any, i: int, j: int, w: int, G: Any) -> None:
    """Add the 4×4 inner products of rows i… and j… of P to G, in sixteen vector registers."""
    zero = P.dtype.type(0)
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = zero
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
    p0, p1, p2, p3 = P[i, :w], P[i + 1, :w], P[i + 2, :w], P[i + 3, :w]
    q0, q1, q2, q3 = P[j, :w], P[j + 1, :w], P[j + 2, :w], P[j + 3, :w]
    for c in range(w):
        a0, a1, a2, a3 = p0[c], p1[c], p2[c], p3[c]
        b0, b1, b2, b3 = q0[c], q1[c], q2[c], q3[c]
        s00 += a0 * b0
        s01 += a0 * b1
        s02 += a0 * b2
        s03 += a0 * b3
        s10 += a1 * b0
        s11 += a1 * b1
        s12 += a1 * b2
        s13 += a1 * b3
        s20 += a2 * b0
        s21 += a2 * b1
        s22 += a2 * b2
        s23 += a2 * b3
        s30 += a3 * b0
        s31 += a3 * b1
        s32 += a3 * b2
        s33 += a3 * b3
    G[i, j] += s00
    G[i, j + 1] += s01
    G[i, j + 2] += s02
    G[i, j + 3] += s03
    G[i + 1, j] += s10
    G[i + 1, j + 1] += s11
    G[i + 1, j + 2] += s12
    G[i + 1, j + 3] += s13
    G[i + 2, j] += s20
    G[i + 2, j + 1] += s21
    G[i + 2, j + 2] += s22
    G[i + 2, j + 3] += s23
    G[i + 3, j] += s30
    G[i + 3, j + 1] += s31
    G[i + 3, j + 2] += s32
    G[i + 3, j + 3] += s33


@jit
def shifted_gram(X: Any, k: int, lo: int, hi: int, P: Any, G: Any, tile: int) -> None:
    """Add to G the inner products of x_i − x_k over columns lo … hi; row n stands for the origin.

    P is scratch of G's height, a multiple of `tile`, 3 or 4; its dtype is the precision of the differences
    and of the sums within a block. G collects the blocks in float64, upper triangle of tiles only. All tiles,
    those on the diagonal too, are computed alike: equal rows get equal bits, whatever the tile.

    Gain: in float64 3.9 for n = 30 and 2.0 to 2.2 for n = 100 (d = 79,510 and 431,080), in float32 3.7 and
    1.7 (d = 2.5e6). Where registers are few, tiles of 3 gain 1.5 over those of 4, whose sums do not fit.
    """
    n = X.shape[0]
    zero = P.dtype.type(0)
    for start in range(lo, hi, P.shape[1]):
        w = min(P.shape[1], hi - start)
        origin = P[n, :w]
        reference = X[k, start : start + w]
        for c in range(w):
            origin[c] = zero - reference[c]
        for i in range(n):
            x = X[i, start : start + w]
            p = P[i, :w]
            for c in range(w):
                p[c] = x[c] + origin[c]
        for i in range(0, G.shape[0], tile):
            for j in range(i, G.shape[0], tile):
                if tile == 3:
                    _nine(P, i, j, w, G)
                else:
                    _sixteen(P, i, j, w, G)


@jit
def weighted_sum(X: Any, rows: Any, weights: Any, lo: int, hi: int, out: Any) -> None:
    """out[lo:hi] = Σ weights_q X[rows_q], summed in float64 and rounded once.

    Gain: 2.1 (n = 30) and 4.6 (n = 100) for d = 79,510, 7 to 8 for 431,080, 10 to 12 for 2.5e6.
    """
    scratch = np.empty(4 * COLUMNS)
    quads = len(rows) // 4 * 4
    for start in range(lo, hi, len(scratch)):
        w = min(len(scratch), hi - start)
        total = scratch[:w]
        total[:] = 0.0
        for q in range(0, quads, 4):
            x0 = X[rows[q], start : start + w]
            x1 = X[rows[q + 1], start : start + w]
            x2 = X[rows[q + 2], start : start + w]
            x3 = X[rows[q + 3], start : start + w]
            w0, w1, w2, w3 = weights[q], weights[q + 1], weights[q + 2], weights[q + 3]
            for c in range(w):
                total[c] += (w0 * x0[c] + w1 * x1[c]) + (w2 * x2[c] + w3 * x3[c])
        for q in range(quads, len(rows)):
            x0 = X[rows[q], start : start + w]
            w0 = weights[q]
            for c in range(w):
                total[c] += w0 * x0[c]
        target = out[start : start + w]
        for c in range(w):
            target[c] = total[c]


@jit
def _mix(A: Any, Y: Any, w: int, V: Any) -> None:
    """V = A·Y on the first w columns, two rows of V and four of Y at a time.

    Gain over a product by torch before the selection: 1.7 to 3.6 (n = 30 and 100, d = 79,510 to 2.5e6).
    """
    n, k = Y.shape[0], A.shape[0]
    quads = n // 4 * 4
    for i in range(0, k, 2):
        other = min(i + 1, k - 1)  # an odd last row is computed twice
        v0, v1 = V[i, :w], V[other, :w]
        v0[:] = 0
        v1[:] = 0
        for j in range(0, quads, 4):
            a0, a1, a2, a3 = A[i, j], A[i, j + 1], A[i, j + 2], A[i, j + 3]
            b0, b1, b2, b3 = A[other, j], A[other, j + 1], A[other, j + 2], A[other, j + 3]
            y0, y1, y2, y3 = Y[j, :w], Y[j + 1, :w], Y[j + 2, :w], Y[j + 3, :w]
            for c in range(w):
                v = v0[c] + ((a0 * y0[c] + a1 * y1[c]) + (a2 * y2[c] + a3 * y3[c]))
                v1[c] += (b0 * y0[c] + b1 * y1[c]) + (b2 * y2[c] + b3 * y3[c])
                v0[c] = v
        for j in range(quads, n):
            a0, b0 = A[i, j], A[other, j]
            y0 = Y[j, :w]
            for c in range(w):
                v = v0[c] + a0 * y0[c]
                v1[c] += b0 * y0[c]
                v0[c] = v


@jit
def _shares(V: Any, m: int, w: int, edges: Any, work: Any, shares: Any) -> None:
    """Add to shares_i, over columns, the part of row i that lies in the window of m sorted values.

    `edges` holds the window's first and last value, its first rank, and the values just outside it. Equal
    values at an edge of the window share the places they hold in it equally.
    """
    k = V.shape[0]
    one, zero = V.dtype.type(1), V.dtype.type(0)
    low, high, start, before, after = edges[0, :w], edges[1, :w], edges[2, :w], edges[3, :w], edges[4, :w]
    tied = zero
    for c in range(w):
        tied += one if (before[c] == low[c]) | (after[c] == high[c]) else zero
    if tied == 0:
        for i in range(k):
            v = V[i, :w]
            total = zero
            for c in range(w):
                total += one if (v[c] >= low[c]) & (v[c] <= high[c]) else zero
            shares[i] += total
        return
    at_low, at_high = work[0, :w], work[1, :w]
    below_low, equal_low, below_high, equal_high = work[2, :w], work[3, :w], work[4, :w], work[5, :w]
    work[2:6, :w] = 0
    for i in range(k):
        v = V[i, :w]
        for c in range(w):
            below_low[c] += one if v[c] < low[c] else zero
            equal_low[c] += one if v[c] == low[c] else zero
            below_high[c] += one if v[c] < high[c] else zero
            equal_high[c] += one if v[c] == high[c] else zero
    for c in range(w):
        end = start[c] + m
        at_low[c] = (min(below_low[c] + equal_low[c], end) - start[c]) / equal_low[c]
        at_high[c] = (end - max(start[c], below_high[c])) / equal_high[c]
    for i in range(k):
        v = V[i, :w]
        total = zero
        for c in range(w):
            inner = one if (v[c] > low[c]) & (v[c] < high[c]) else zero
            total += at_low[c] if v[c] == low[c] else (at_high[c] if v[c] == high[c] else inner)
        shares[i] += total


@jit
def window_means(
    X: Any,
    rows: Any,
    k: int,
    A: Any,
    network: Any,
    m: int,
    around: bool,
    lo: int,
    hi: int,
    width: int,
    out: Any,
    shares: Any,
    squares: Any,
) -> None:
    """Mean of a window of m sorted values in each column lo … hi of A·X[rows], or of X[rows] if A is empty.

    The window is the middle one, or (`around`) the m values nearest to the median. With k ≥ 0, rows are
    first shifted by row k, so that mixing loses nothing to a common offset. A's dtype is that of the work.
    `shares` gets every (mixed) row's part of the window and `squares` every row's squared distance from the
    result, both summed over columns.

    Gain: 6.5 to 16 for n = 30 (d = 79,510 to 2.5e6), 2.6 to 6.8 for n = 100 (d = 79,510 and 431,080).
    """
    n = len(rows)
    mixing = A.shape[0] > 0
    height = A.shape[0] if mixing else n
    Y = np.empty((n, width), A.dtype)
    V = np.empty((height, width), A.dtype) if mixing else Y
    S = np.empty((height, width), A.dtype)
    work = np.empty((6, width), A.dtype)
    edges = np.empty((5, width), A.dtype)
    shift = np.empty(width, A.dtype)
    middle = np.empty(width)
    total = np.empty(width)
    a, b = (height - 1) // 2, height // 2
    nan = A.dtype.type(np.nan)
    for first in range(lo, hi, width):
        w = min(width, hi - first)
        low, high, start, before, after = edges[0, :w], edges[1, :w], edges[2, :w], edges[3, :w], edges[4, :w]
        before[:] = nan  # equal to nothing, as is right where the window reaches the first or last value
        after[:] = nan
        offset = shift[:w]
        offset[:] = 0
        if k >= 0:
            offset[:] = X[k, first : first + w]
        for i in range(n):
            x = X[rows[i], first : first + w]
            y = Y[i, :w]
            for c in range(w):
                y[c] = x[c] - offset[c]
        if mixing:
            _mix(A, Y, w, V)
        for i in range(height):
            S[i, :w] = V[i, :w]
        for q in range(network.shape[0]):
            s, t = S[network[q, 0], :w], S[network[q, 1], :w]
            for c in range(w):
                x, y = s[c], t[c]
                s[c] = x if x < y else y
                t[c] = y if x < y else x
        value = total[:w]
        value[:] = 0.0
        share = 1.0 / m
        gap = height - m
        if around:
            centre = middle[:w]
            for c in range(w):
                centre[c] = 0.5 * S[a, c] + 0.5 * S[b, c]
            start[:] = 0
            low[:] = S[0, :w]
            high[:] = S[m - 1, :w]
            if gap > 0:
                after[:] = S[m, :w]
            for r in range(gap):
                s, t, u = S[r, :w], S[r + m, :w], S[r + 1, :w]
                beyond = S[min(r + m + 1, height - 1), :w]
                final = r + m + 1 >= height
                for c in range(w):
                    # The value on the left is farther from the median than the one on the right.
                    step = 0.5 * s[c] + 0.5 * t[c] < centre[c]
                    start[c] = r + 1 if step else start[c]
                    before[c] = s[c] if step else before[c]
                    low[c] = u[c] if step else low[c]
                    high[c] = t[c] if step else high[c]
                    after[c] = (nan if final else beyond[c]) if step else after[c]
            for r in range(height):
                s = S[r, :w]
                for c in range(w):
                    value[c] += share * s[c] if (r >= start[c]) & (r < start[c] + m) else 0.0
        else:
            trim = gap // 2
            start[:] = trim
            low[:] = S[trim, :w]
            high[:] = S[trim + m - 1, :w]
            if trim > 0:
                before[:] = S[trim - 1, :w]
                after[:] = S[trim + m, :w]
            for r in range(trim, trim + m):
                s = S[r, :w]
                for c in range(w):
                    value[c] += share * s[c]
        target = out[first : first + w]
        for c in range(w):
            target[c] = value[c] + offset[c]
        _shares(V, m, w, edges, work, shares)
        for i in range(n):
            y = Y[i, :w]
            distance = 0.0
            for c in range(w):
                distance += (y[c] - value[c]) * (y[c] - value[c])
            squares[i] += distance
