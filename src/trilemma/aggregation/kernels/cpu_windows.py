"""CPU kernels that sort the columns of messages and take the mean of a window of them: see `kernels`.

The median, the trimmed mean and the mean around the median, after mixing or without, in one pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trilemma.aggregation.kernels.cpu import jit


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
def _sort(S: Any, network: Any, w: int) -> None:
    """Sort the first w columns, by exchanges of rows that a network says."""
    for q in range(network.shape[0]):
        s, t = S[network[q, 0], :w], S[network[q, 1], :w]
        for c in range(w):
            x, y = s[c], t[c]
            s[c] = x if x < y else y
            t[c] = y if x < y else x


@jit
def _nearest(S: Any, m: int, w: int, centre: Any, edges: Any) -> None:
    """Find the m of the sorted values nearest to a centre in each column; `edges` as `_shares` reads them."""
    height = S.shape[0]
    gap = height - m
    nan = S.dtype.type(np.nan)
    low, high, start, before, after = edges[0, :w], edges[1, :w], edges[2, :w], edges[3, :w], edges[4, :w]
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
        _sort(S, network, w)
        value = total[:w]
        value[:] = 0.0
        share = 1.0 / m
        gap = height - m
        if around:
            centre = middle[:w]
            for c in range(w):
                centre[c] = 0.5 * S[a, c] + 0.5 * S[b, c]
            _nearest(S, m, w, centre, edges)
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
