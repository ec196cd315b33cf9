"""CPU kernels, compiled by numba: blocks of columns are brought into cache once and worked on there.

Here are those that sum over rows or columns, and how all are compiled; `window_kernels` has those that sort.
Imported only through `trilemma.aggregation.passes.blocks`, which does without them where numba cannot be
used.

All loops run over the columns of contiguous rows, the shape LLVM turns into full-width vector code. Sums may
be reordered (once, at compile time): the same input gives the same bits. NaN and infinity keep their meaning.

Gains are over the best plain torch version of the same operation, on two threads of a CPU (AVX-512), float32
messages, as `python benchmarks/kernels.py` measures them.
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
